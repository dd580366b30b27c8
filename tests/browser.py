"""A headless Chromium, driven by the WebDriver protocol of Debian's chromium-driver; needs no other package."""

from __future__ import annotations

import base64
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

MISSING = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
REASON = f"{' and '.join(MISSING)} not installed: apt-get install chromium chromium-driver"


class Browser:
    """A window of a browser.

    Args:
        address: of the driver.
        session: its name.
    """

    def __init__(self, address: str, session: str) -> None:
        self._address = f"{address}/session/{session}"

    def open(self, page: Path) -> None:
        self._send("/url", {"url": page.resolve().as_uri()})

    def run(self, script: str, *arguments: Any) -> Any:
        """The value that a script returns."""
        return self._send("/execute/sync", {"script": script, "args": list(arguments)})

    def point_at(self, x: float, y: float, click: bool = False) -> None:
        """Move the pointer to a place of the window, and press it if requested."""
        moves = [{"type": "pointerMove", "duration": 0, "x": round(x), "y": round(y)}]
        moves += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}] if click else []
        self._send("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": moves}]})

    def set_dark(self, dark: bool) -> None:
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self._devtools("Emulation.setEmulatedMedia", {"features": features})

    def set_size(self, width: int, height: int, phone: bool = False) -> None:
        """The size of the window, in pixels of the page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": phone}
        self._devtools("Emulation.setDeviceMetricsOverride", size)

    def screenshot(self, file: Path) -> Path:
        """The whole page."""
        found = self._devtools("Page.captureScreenshot", {"captureBeyondViewport": True})
        file.write_bytes(base64.b64decode(found["data"]))
        return file

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self._send("/print", {}))

    def errors(self) -> list[str]:
        """What the console shows since the last call: errors, and what the page was not allowed to do."""
        return [entry["message"] for entry in self._send("/se/log", {"type": "browser"})]

    def _devtools(self, command: str, parameters: dict[str, Any]) -> Any:
        return self._send("/goog/cdp/execute", {"cmd": command, "params": parameters})

    def _send(self, path: str, body: dict[str, Any]) -> Any:
        return send(self._address + path, body)


def send(address: str, body: dict[str, Any] | None, method: str = "POST") -> Any:
    data = None if body is None else json.dumps(body).encode()
    with urlopen(Request(address, data, {"Content-Type": "application/json"}, method=method), timeout=60) as answer:
        return json.loads(answer.read())["value"]


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser that is closed in the end."""
    driver = subprocess.Popen(["chromedriver", "--port=0"], stdout=subprocess.PIPE, text=True)
    try:
        port = next(found[1] for line in driver.stdout if (found := re.search(r"successfully on port (\d+)", line)))
        address = f"http://127.0.0.1:{port}"
        flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb"]
        options = {"goog:chromeOptions": {"args": flags}, "goog:loggingPrefs": {"browser": "ALL"}}
        session = send(f"{address}/session", {"capabilities": {"alwaysMatch": options}})["sessionId"]
        try:
            yield Browser(address, session)
        finally:
            send(f"{address}/session/{session}", None, "DELETE")
    finally:
        driver.terminate()
        driver.wait(10)
        driver.stdout.close()
