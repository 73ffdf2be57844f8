"""Headless Chromium, driven by its DevTools protocol. Debian has it as the package chromium."""

from __future__ import annotations

import base64
import itertools
import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from urllib.request import urlopen

import websocket

CHROMIUM: Final = "chromium"
_PATIENCE_SECONDS: Final = 60.0


class Browser:
    """A browser with one page, from its start until the end of a `with` block.

    Args:
        width: of the page, in pixels.
        height: of the page, in pixels.
    """

    def __init__(self, width: int = 900, height: int = 660) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)  # helpers of Chromium may outlive it
        self._numbers = itertools.count(1)
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [f"--user-data-dir={self._profile.name}"]
        self._process = subprocess.Popen(
            [*command, "--remote-debugging-port=0", "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            self._socket = websocket.create_connection(
                self._page_address(), timeout=_PATIENCE_SECONDS, suppress_origin=True
            )
            self._call("Page.enable")
            size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
            self._call("Emulation.setDeviceMetricsOverride", **size)
        except BaseException:
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()
        self._end()

    def open(self, url: str) -> None:
        """Open a page and wait until it is loaded."""
        self._call("Page.navigate", url=url)
        self._receive(lambda message: message.get("method") == "Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        answer = self._call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true.

        Raises:
            websocket.WebSocketTimeoutException: it did not become true within a minute.
        """
        check = f"() => {{ if ({condition}) {{ clearInterval(timer); done(true); }} }}"
        self.evaluate(f"new Promise(done => {{ const timer = setInterval({check}, 20); }})")

    def screenshot(self) -> bytes:
        """What the window shows, as a PNG."""
        return base64.b64decode(self._call("Page.captureScreenshot")["data"])

    def _page_address(self) -> str:
        port = self._port()
        with urlopen(f"http://127.0.0.1:{port}/json/list", timeout=_PATIENCE_SECONDS) as response:
            pages: list[dict[str, str]] = json.load(response)
        return next(page["webSocketDebuggerUrl"] for page in pages if page["type"] == "page")

    def _port(self) -> int:
        """The port of the protocol, which Chromium writes into its profile."""
        path = Path(self._profile.name) / "DevToolsActivePort"
        deadline = time.monotonic() + _PATIENCE_SECONDS
        while not (path.is_file() and "\n" in path.read_text()):
            assert self._process.poll() is None, "Chromium has ended"
            assert time.monotonic() < deadline, "Chromium does not start"
            time.sleep(0.05)
        return int(path.read_text().splitlines()[0])

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        self._socket.send(json.dumps({"id": number, "method": method, "params": parameters}))
        answer = self._receive(lambda message: message.get("id") == number)
        assert "error" not in answer, answer
        result: dict[str, Any] = answer["result"]
        return result

    def _receive(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        while True:
            message: dict[str, Any] = json.loads(self._socket.recv())
            if wanted(message):
                return message

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(_PATIENCE_SECONDS)
        self._profile.cleanup()
