"""The page of a run and of a sweep: self-contained, escaped, bounded, and with the numbers of results.json."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import MISSING, REASON, browser
from hypothesis import example, given
from hypothesis import strategies as st
from matplotlib.image import imread
from safetensors.torch import load_file, save_file

from sparse_lightning.report import History, Outcome, Row, sweep, write_page, write_report
from sparse_lightning.report.metric_record import MetricRecord
from sparse_lightning.report.outcome import ScopeRow
from sparse_lightning.report.page.axes import ticks
from sparse_lightning.report.page.markup import element
from sparse_lightning.report.results_table import number_text

HOSTILE = "</script></title><script>window.hacked=1</script><img src=x onerror=window.hacked=1>\"'><b>"
VOID = {"img", "meta", "br"}


class Page(HTMLParser):
    """The elements of a page with their attributes, and the text inside of each."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(text)
        self.close()
        assert not self._open, f"not closed: {[tag for tag, *_ in self._open]}"

    def handle_starttag(self, tag, attrs):
        entry = (tag, dict(attrs), [])
        self.found.append(entry)
        if tag not in VOID:
            self._open.append(entry)

    def handle_endtag(self, tag):
        assert self._open.pop()[0] == tag

    def handle_data(self, data):
        for _, _, texts in self._open:
            texts.append(data)

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attributes, "".join(texts)) for name, attributes, texts in self.found if name == tag]

    def text(self) -> str:
        return " ".join(" ".join(text for _, text in self.all("body")).split())

    def keyed(self) -> dict[str, str]:
        """The text of each element that shows a number of results.json, by its place there."""
        marked = [(a["data-key"], "".join(texts)) for _, a, texts in self.found if "data-key" in a]
        return {key: text for key, text in marked if key}


def write_run(folder: Path, names=("up.weight", "down.weight"), accuracy: float = 0.875) -> Path:
    """The files of a small run, as the command line leaves them."""
    torch.manual_seed(0)
    masks = {names[0]: torch.rand(8, 4) < 0.75, names[1]: torch.rand(24, 1) < 0.75}
    rows = [Row(name, (32, 16), "4×4", 512, 384, 380 - i) for i, name in enumerate(names)]
    scopes = [ScopeRow(name, "blocks", mask.numel(), int((~mask).sum())) for name, mask in masks.items()]
    history = History()
    history.steps, history.target, history.actual = [0, 10, 20], [0.0, 0.5, 0.75], [0.0, 0.5, 0.742]
    history.loss_steps, history.loss = list(range(1, 21)), [1 / step for step in range(1, 20)] + [float("nan")]
    history.metrics = {"val_accuracy": MetricRecord([10, 20], [0.5, accuracy])}
    outcome = Outcome(tuple(rows), masks, 0.75, 0.742, 20, tuple(scopes))
    results = {"dense": {"val_accuracy": 0.9, "val_loss": 0.3}, "sparse": {"val_accuracy": accuracy, "val_loss": 0.4}}
    write_report(folder, outcome, history, results)
    return folder


def test_a_page_shows_what_is_left_of_each_family_and_sizes_and_times(tmp_path):
    write_run(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert "Families" not in read(tmp_path).text()
    results["families"] = [{"name": "mlp (units)", "units": 1024, "left": 256}, {"name": "a", "units": 8, "left": 8}]
    costs = {"dense": {"parameters": 4096, "bytes": 16384, "ms": 0.5}, "sparse": {"parameters": 1024, "bytes": 4096}}
    results["footprint"] = {**costs, "export": "compact"}
    (tmp_path / "results.json").write_text(json.dumps(results), "utf-8")
    write_page(tmp_path)
    page = read(tmp_path)
    shown = page.keyed()
    assert (shown["footprint.dense.parameters"], shown["footprint.sparse.bytes"]) == ("4,096", "4,096")
    assert (shown["footprint.dense.ms"], shown["footprint.sparse.ms"]) == ("0.5000", "-")
    assert (shown["families.0.units"], shown["families.0.left"], shown["families.1.left"]) == ("1,024", "256", "8")
    assert "mlp (units)1,02425625.0%" in page.text()


def test_weights_that_units_of_two_families_share_are_counted_once(tmp_path):
    write_run(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    results |= {"zero": 150, "weights": 1024}
    (tmp_path / "results.json").write_text(json.dumps(results), "utf-8")
    write_page(tmp_path)
    assert "weights kept874 of 1,024" in read(tmp_path).text()


def write_hydra(folder: Path, overrides: list[str], name: str = ".hydra/hydra.yaml") -> None:
    """What Hydra writes about the command line."""
    (folder / ".hydra").mkdir(exist_ok=True)
    lines = "".join(f"    - {json.dumps(override)}\n" for override in overrides)
    sources = "    config_sources:\n    - path: my conf\n      provider: command-line\n"
    (folder / name).write_text(f"hydra:\n  overrides:\n    task:\n{lines}  runtime:\n{sources}", "utf-8")


def read(folder: Path) -> Page:
    return Page((folder / "report.html").read_text("utf-8"))


def value_at(results, key: str):
    for part in key.split("."):
        results = results[int(part)] if isinstance(results, list) else results[part]
    return results


@given(st.text())
def test_any_text_is_read_back_and_adds_no_element(text):
    text = re.sub("[\x00\r\ud800-\udfff]", "", text)  # what HTML can't hold
    ((tag, attributes, texts),) = Page(element("p", text, title=text)).found
    assert (tag, "".join(texts), attributes) == ("p", text, {"title": text})


def test_the_numbers_are_those_of_results_json(tmp_path):
    shown = read(write_run(tmp_path)).keyed()
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    assert {"target", "actual", "step", "sparse.val_loss", "dense.val_accuracy", "parameters.1.actual"} <= set(shown)
    for key, text in shown.items():
        value = value_at(results, key)
        assert text == (f"{value:,}" if isinstance(value, int) else number_text(value)), key


def test_a_page_shows_masks_scopes_files_configuration_and_command(tmp_path):
    write_run(tmp_path)
    (tmp_path / "config.yaml").write_text("name: digits\nseed: 3\n")
    (tmp_path / "model.safetensors").write_bytes(bytes(1234))
    write_hydra(tmp_path, ["recipe=digits_blocks", "schedule.final=0.5", "pattern.blocks.match=[a b]"])
    write_page(tmp_path)
    page = read(tmp_path)
    assert page.all("h1")[0][1] == "digits"
    headings = [text for _, text in page.all("h2")]
    wanted = ["Results", "Curves", "Masks", "Scopes", "Parameters", "Files", "Configuration", "Command"]
    assert headings == wanted
    codes = [text for _, text in page.all("code")]
    command = "sparse-lightning --config-dir 'my conf' recipe=digits_blocks schedule.final=0.5"
    assert codes == ["name: digits\nseed: 3\n", f"{command} 'pattern.blocks.match=[a b]'"]
    assert "model.safetensors 1,234" in page.text().replace("1,234", " 1,234").replace("  ", " ")
    assert [attributes["alt"] for attributes, _ in page.all("img")] == [
        f"mask of {name}: {shape} blocks, {kept} of {n} kept, {1 - kept / n:.1%} pruned"
        for name, shape, n, kept in mask_counts(tmp_path)
    ]
    titles = [text for _, text in page.all("title")]
    assert "sparsity over optimizer step: actual from 0.0000 to 0.7420; target from 0.0000 to 0.7500." in titles


def mask_counts(folder: Path):
    masks = load_file(folder / "masks.safetensors")
    for name in ("up.weight", "down.weight"):
        mask = masks[name]
        yield name, "×".join(map(str, mask.shape)), mask.numel(), int((~mask).sum())


def test_a_mask_is_an_image_with_a_pixel_for_each_block(tmp_path):
    write_run(tmp_path)
    first = read(tmp_path).all("img")[0][0]
    (tmp_path / "mask.png").write_bytes(base64.b64decode(first["src"].partition("base64,")[2]))
    kept = imread(tmp_path / "mask.png")[..., 3]
    assert np.array_equal(kept == 0, load_file(tmp_path / "masks.safetensors")["up.weight"].numpy())


def test_what_else_results_json_has_is_shown(tmp_path):
    write_run(tmp_path)
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    results["exports"] = [{"name": "compact", "bytes": 120345, "speedup": 1.75}, {"name": "tiled", "bytes": 98}]
    results["speed"] = {"dense": {"ms": 2.5}, "compact": {"ms": None}}
    results["note"] = "measured twice"
    (tmp_path / "results.json").write_text(json.dumps(results))
    write_page(tmp_path)
    page = read(tmp_path)
    assert [text for _, text in page.all("h2")][5:8] == ["Exports", "Speed", "Note"]
    for text in ("compact", "120,345", "1.7500", "tiled", "2.5000", "measured twice"):
        assert text in page.text(), text


def test_hostile_names_and_values_stay_text(tmp_path):
    write_run(tmp_path, (f"up{HOSTILE}", "down.weight"))
    (tmp_path / "config.yaml").write_text(json.dumps({"name": HOSTILE}))
    write_hydra(tmp_path, [f"name={HOSTILE}"])
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    results[HOSTILE] = {HOSTILE: HOSTILE}
    results["history"]["metrics"][HOSTILE] = {"steps": [1, 2], "values": [0.5, 0.25]}
    (tmp_path / "results.json").write_text(json.dumps(results))
    write_page(tmp_path)
    check_inert(read(tmp_path))
    assert read(tmp_path).all("h1")[0][1] == HOSTILE


def check_inert(page: Page) -> None:
    """Only the script of the package may run, and nothing is loaded."""
    ((_, script),) = page.all("script")
    policy = next(a["content"] for a, _ in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert "default-src 'none'" in policy
    for tag, attributes, _ in page.found:
        assert tag in ELEMENTS, tag
        assert not any(name.startswith("on") for name in attributes), attributes
        for name in ("src", "href"):
            assert (attributes.get(name) or "data:").startswith("data:") or tag == "a", attributes


ELEMENTS = {
    *("html", "head", "meta", "title", "style", "body", "header", "main", "section", "script", "h1", "h2", "p", "div"),
    *("span", "strong", "a", "dl", "dt", "dd", "ul", "li", "details", "summary", "button", "pre", "code", "img"),
    *("table", "caption", "thead", "tbody", "tr", "th", "td", "figure", "figcaption"),
    *("svg", "g", "line", "path", "rect", "circle", "text"),
}


def test_a_page_of_a_large_model_is_bounded(tmp_path):
    write_run(tmp_path)
    masks = {f"layers.{i}.weight": torch.rand(512, 300) < 0.5 for i in range(300)}
    save_file(masks, tmp_path / "masks.safetensors")
    page = write_page(tmp_path)
    assert page.stat().st_size < 4_000_000
    assert len(read(tmp_path).all("img")) == 256
    assert "44 of 300 masks are not shown" in read(tmp_path).text()


def test_an_empty_history_has_no_charts(tmp_path):
    outcome = Outcome((), {"w": torch.zeros(0, 3, dtype=torch.bool)}, 0.0, 0.0, 0)
    write_report(tmp_path, outcome, History(), {"sparse": {"val_loss": float("nan")}})
    page = read(tmp_path)
    assert not page.all("figure")
    assert page.keyed()["sparse.val_loss"] == "-"


@given(st.floats(-1e9, 1e9), st.floats(-1e9, 1e9))
@example(0.0, 5e-324)
@example(1.0, 1.0 + 2**-52)
def test_ticks_are_few_even_and_span_the_values(one, other):
    low, high = sorted((one, other))
    found = ticks(low, high)
    assert found[0] <= low + 1e-6 * (high - low)
    assert found[-1] >= high - 1e-6 * (high - low)
    assert 2 <= len(found) <= 8
    assert found == sorted(set(found))


def test_a_sweep_compares_its_runs(tmp_path):
    for i, accuracy in enumerate((0.8, 0.9)):
        run = write_run(tmp_path / str(i), accuracy=accuracy)
        write_hydra(run, [])
        (run / ".hydra" / "overrides.yaml").write_text(f"- criterion=c{i}<script>x</script>\n")
    (tmp_path / "2" / ".hydra").mkdir(parents=True)
    (tmp_path / "2" / ".hydra" / "overrides.yaml").write_text("- criterion=c2\n")
    write_hydra(tmp_path, ["criterion=c0,c1,c2"], "multirun.yaml")
    sweep(tmp_path)
    page = read(tmp_path)
    check_inert(page)
    shown = page.keyed()
    for i in range(2):
        results = json.loads((tmp_path / str(i) / "results.json").read_text("utf-8"))
        for key in ("target", "actual", "dense.val_accuracy", "sparse.val_accuracy"):
            assert shown[f"{i}/{key}"] == number_text(value_at(results, key))
    assert [attributes["href"] for attributes, _ in page.all("a")] == ["1/report.html", "0/report.html"]
    assert [text for _, text in page.all("h2")] == ["Runs", "Comparison", "Command"]
    assert "3 runs, 1 failed; the best val_accuracy is 0.9000, of run 1" in page.text()
    assert page.all("code")[-1][1] == "sparse-lightning -m --config-dir 'my conf' criterion=c0,c1,c2"
    assert len(page.all("figure")) == 2


@pytest.fixture(scope="module")
def window():
    with browser() as found:
        yield found


def shown_numbers(window) -> dict[str, str]:
    script = "return [...document.querySelectorAll('[data-key]')].map(e => [e.dataset.key, e.innerText])"
    return dict(window.run(script))


@pytest.mark.browser
@pytest.mark.skipif(bool(MISSING), reason=REASON)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
def test_a_real_browser_shows_the_page(window, tmp_path, width, dark):
    write_run(tmp_path, (f"up{HOSTILE}", "down.weight"))
    (tmp_path / "config.yaml").write_text(json.dumps({"name": HOSTILE, "long": "word " * 100}))
    write_hydra(tmp_path, ["recipe=digits_blocks"])
    results = json.loads((tmp_path / "results.json").read_text("utf-8"))
    page = write_page(tmp_path)
    window.set_size(width, 900, phone=width < 500)
    window.set_dark(dark)
    window.open(page)
    for key, text in shown_numbers(window).items():
        value = value_at(results, key)
        assert text == (f"{value:,}" if isinstance(value, int) else number_text(value)), key
    assert window.run("return window.hacked") is None
    assert window.run("return document.documentElement.scrollWidth") <= width, "the page scrolls sideways"
    brightness = window.run("return getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (sum(brightness[:3]) < 200) == dark
    picture = imread(window.screenshot(tmp_path / "page.png"))[..., :3]
    assert picture.shape[1] == width
    assert len(np.unique((picture * 255).astype(int) @ [1 << 16, 1 << 8, 1])) > 50, "nearly blank"
    assert window.errors() == []


@pytest.mark.browser
@pytest.mark.skipif(bool(MISSING), reason=REASON)
def test_blocks_and_curves_are_read_under_the_pointer_and_masks_enlarge(window, tmp_path):
    page = write_run(tmp_path) / "report.html"
    masks = load_file(tmp_path / "masks.safetensors")
    window.set_size(1280, 900)
    window.open(page)
    check_readings(window, masks["up.weight"], "figure img", ".masks .reading")
    window.run("document.querySelector('.mask').click()")
    check_readings(window, masks["up.weight"], "dialog img", "dialog .reading")
    size = "return document.querySelector('dialog img').width"
    before = window.run(size)
    window.run("document.querySelector('dialog [aria-label=\"Zoom out\"]').click()")
    assert window.run(size) == before // 2
    window.run("document.querySelector('dialog [aria-label=Close]').click()")
    window.run("document.querySelector('.chart').scrollIntoView()")
    x, y, w, h = window.run(BOX, ".chart svg")
    window.point_at(x + w * 0.98, y + h / 2)
    reading = window.run("return document.querySelector('.chart .reading').textContent")
    assert reading == "optimizer step 20: actual 0.7420, target 0.7500"
    assert window.pdf().startswith(b"%PDF")
    assert window.errors() == []


BOX = "const b = document.querySelector(arguments[0]).getBoundingClientRect(); return [b.x, b.y, b.width, b.height]"


def check_readings(window, mask: torch.Tensor, image: str, reading: str) -> None:
    """What is read in the middle of a few blocks is what the mask says."""
    window.run("document.querySelector(arguments[0]).scrollIntoView({block: 'center'})", image)
    x, y, w, h = window.run(BOX, image)
    rows, columns = mask.shape
    for i, j in ((0, 0), (3, 1), (rows - 1, columns - 1)):
        window.point_at(x + w * (j + 0.5) / columns, y + h * (i + 0.5) / rows)
        text = window.run("return document.querySelector(arguments[0]).textContent", reading)
        assert text == f"block {i}, {j}: {'pruned' if mask[i, j] else 'kept'}"
