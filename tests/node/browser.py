"""A headless Chromium, driven over a pipe: open a page, run a script in it, click, take a picture."""

from __future__ import annotations

import base64
import fcntl
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any, Self

_FETCHED = Path(__file__).resolve().parents[2] / ".cache/browser/chromium"  # by tools/browser.sh
_NAMES = ("chromium", "chromium-browser", "google-chrome", str(_FETCHED))
BROWSER = next(filter(None, map(shutil.which, _NAMES)), None)
ANSWER_S = 60.0


class Browser:
    """One browser with one page. The page's errors are in `complaints`."""

    def __init__(self, profile: Path) -> None:
        assert BROWSER is not None
        self.complaints: list[str] = []
        self._numbers = itertools.count(1)
        self._received = b""
        (reads, self._to), (self._from, writes) = os.pipe(), os.pipe()
        # The browser reads commands from descriptor 3 and writes answers to 4, each message ended by a NUL.
        hears, says = (fcntl.fcntl(one, fcntl.F_DUPFD, 100) for one in (reads, writes))
        options = (
            "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --remote-debugging-pipe"
            f" --no-first-run --user-data-dir={profile}"
        )
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$0" {options} 3<&{hears} 4>&{says}', BROWSER],
            pass_fds=(hears, says),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for one in (reads, writes, hears, says):
            os.close(one)
        self._session = ""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self._heard(answer)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            assert select.select([self._from], [], [], ANSWER_S)[0], "the browser does not answer"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._received += piece
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def _heard(self, event: dict[str, Any]) -> None:
        told = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.complaints.append(str(told["exceptionDetails"]))
        entry = told.get("entry", {})
        if entry.get("level") == "error" and entry["source"] != "network":
            self.complaints.append(entry["text"])

    def run(self, script: str) -> Any:
        """The value of an expression in the page."""
        told = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in told, told
        return told["result"].get("value")

    def open(self, url: str) -> None:
        """Open a page, and wait until it has its first answer."""
        self.call("Page.navigate", url=url)
        self.wait("document.title.startsWith('kvstore ')")

    def wait(self, condition: str, timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not self.run(f"!!({condition})"):
            assert time.monotonic() < deadline, (condition, self.complaints, self.text("body"))
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        return str(self.run(f"document.querySelector({json.dumps(selector)}).innerText"))

    def click(self, script: str) -> None:
        self.run(f"({script}).click()")

    def picture(self, path: Path, width: int, height: int, *, dark: bool = False) -> None:
        """Take a screenshot of a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
