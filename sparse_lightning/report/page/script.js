"use strict";
// What a page does beyond being read: values under the pointer, masks that enlarge, texts that are copied.

const sizes = (text) => text.split("×").map(Number);

// Charts: the values of all lines at the position that is nearest to the pointer.
for (const chart of document.querySelectorAll(".chart")) {
  const lines = JSON.parse(chart.dataset.lines);
  const svg = chart.querySelector("svg");
  const [cursor, reading] = [chart.querySelector(".cursor"), chart.querySelector(".reading")];
  const nearest = (points, pixel) =>
    points.reduce((best, point) => (Math.abs(point[0] - pixel) < Math.abs(best[0] - pixel) ? point : best));
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect();
    const pixel = ((event.clientX - box.left) / box.width) * svg.viewBox.baseVal.width;
    const found = lines.map(([label, points]) => [label, nearest(points, pixel)]);
    const first = nearest(found.map(([, point]) => point), pixel);
    cursor.setAttribute("x1", first[0]);
    cursor.setAttribute("x2", first[0]);
    cursor.setAttribute("visibility", "visible");
    const values = found.map(([label, point]) => `${label} ${point[2]}`).join(", ");
    reading.textContent = `${chart.dataset.x} ${Number(first[1].toFixed(4))}: ${values}`;
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    reading.textContent = "";
  });
}

// Masks: the share of blocks that a pixel keeps is its opacity.
const opacities = new WeakMap();
function opacity(image, row, column) {
  const [height, width] = sizes(image.dataset.pixels);
  if (!opacities.has(image)) {
    const canvas = document.createElement("canvas");
    [canvas.width, canvas.height] = [width, height];
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0, width, height);
    opacities.set(image, context.getImageData(0, 0, width, height).data);
  }
  return opacities.get(image)[4 * (row * width + column) + 3] / 255;
}

function blockAt(image, event) {
  const box = image.getBoundingClientRect();
  const [height, width] = sizes(image.dataset.pixels);
  const [rows, columns] = sizes(image.dataset.grid);
  const place = (at, size, count) => Math.min(count - 1, Math.max(0, Math.floor((at / size) * count)));
  const row = place(event.clientY - box.top, box.height, height);
  const column = place(event.clientX - box.left, box.width, width);
  const kept = opacity(image, row, column);
  if (height === rows && width === columns) {
    const index = row * columns + column;
    const shape = sizes(image.dataset.shape);
    if (index >= shape.reduce((a, b) => a * b, 1)) return "";
    return `block ${coordinate(index, shape)}: ${kept > 0.5 ? "kept" : "pruned"}`;
  }
  const span = (at, pixels, count) => {
    const [first, last] = [Math.floor((at * count) / pixels), Math.ceil(((at + 1) * count) / pixels) - 1];
    return first === last ? `${first}` : `${first}–${last}`;
  };
  return `blocks ${span(row, height, rows)}, ${span(column, width, columns)}: about ${Math.round(100 * kept)}% kept`;
}

function coordinate(index, shape) {
  const found = [];
  for (const size of [...shape].reverse()) {
    found.unshift(index % size);
    index = Math.floor(index / size);
  }
  return found.join(", ");
}

function readBlocks(image, reading) {
  const show = (event) => { reading.textContent = blockAt(image, event); };
  image.addEventListener("pointermove", show);
  image.addEventListener("pointerdown", show);
  image.addEventListener("pointerleave", () => { reading.textContent = ""; });
}

function make(tag, text, properties = {}) {
  return Object.assign(document.createElement(tag), { textContent: text, ...properties });
}

function enlarge(figure) {
  const image = figure.querySelector("img").cloneNode();
  const name = figure.querySelector("figcaption").textContent;
  const [height, width] = sizes(image.dataset.pixels);
  const dialog = make("dialog", "");
  dialog.setAttribute("aria-label", `mask of ${name}`);
  const [controls, viewport] = [make("div", "", { className: "controls" }), make("div", "", { className: "viewport" })];
  const reading = make("p", "", { className: "reading" });
  reading.setAttribute("aria-live", "polite");
  viewport.tabIndex = 0;
  viewport.append(image);
  let scale = 1;
  const resize = (wanted) => {
    const [x, y] = [viewport.scrollLeft / scale, viewport.scrollTop / scale];
    scale = Math.min(64, Math.max(1, wanted));
    [image.width, image.height] = [width * scale, height * scale];
    viewport.scrollTo(x * scale, y * scale);
  };
  const fit = () => resize(Math.floor(Math.min(viewport.clientWidth / width, viewport.clientHeight / height)));
  const button = (text, label, action) => {
    const made = make("button", text, { type: "button", onclick: action });
    made.setAttribute("aria-label", label);
    return made;
  };
  controls.append(
    make("strong", name),
    button("−", "Zoom out", () => resize(scale / 2)),
    button("+", "Zoom in", () => resize(scale * 2)),
    button("Fit", "Fit to the window", fit),
    button("Close", "Close", () => dialog.close()),
  );
  viewport.addEventListener("wheel", (event) => {
    if (!event.ctrlKey) return;
    event.preventDefault();
    resize(event.deltaY < 0 ? scale * 2 : scale / 2);
  }, { passive: false });
  dialog.append(controls, reading, viewport);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
  fit();
  readBlocks(image, reading);
}

for (const button of document.querySelectorAll(".mask")) {
  const figure = button.closest("figure");
  readBlocks(button.querySelector("img"), figure.querySelector(".reading"));
  button.addEventListener("click", () => enlarge(figure));
}

// Without a clipboard, as in some pages that are opened from a file, the text is selected instead.
for (const button of document.querySelectorAll(".copy")) {
  const code = button.parentElement.querySelector("code");
  button.addEventListener("click", async () => {
    getSelection().selectAllChildren(code);
    const copied = await navigator.clipboard?.writeText(code.textContent).then(() => true, () => false);
    button.textContent = copied ? "Copied" : "Selected";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
}

addEventListener("beforeprint", () => {
  for (const folded of document.querySelectorAll("section > details")) folded.open = true;
});
