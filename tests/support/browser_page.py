"""A real Chromium without a driver: its own debugging protocol, over one websocket."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import httpx
import pytest
from tornado.websocket import WebSocketClientConnection, websocket_connect

from tests.support.waiting import eventually, patient

BROWSERS: Final = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


class BrowserPage:
    """One page of a browser: its address, size, keys, and what is in it."""

    def __init__(self, socket: WebSocketClientConnection) -> None:
        self._socket = socket
        self._number = 0

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol; its events are passed over."""
        self._number += 1
        await self._socket.write_message(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            text = await asyncio.wait_for(self._socket.read_message(), patient(60))
            assert text is not None, "the browser has gone"
            answer = json.loads(text)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                found: dict[str, Any] = answer["result"]
                return found

    async def open(self, url: str) -> None:
        await self.call("Page.enable")
        await self.call("Page.bringToFront")  # keys go to the page in front
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    async def value(self, expression: str) -> Any:
        """Return the value of an expression of the page's JavaScript."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Return the first true value of an expression."""
        async with asyncio.timeout(patient(30)):
            while not (found := await self.value(expression)):
                await asyncio.sleep(0.05)
            return found

    async def press(self, key: str, text: str = "") -> None:
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, text=text,
                        windowsVirtualKeyCode={"Tab": 9, "Enter": 13}[key])  # fmt: skip
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    async def look(self, *, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the window, and whether the user prefers the dark."""
        await self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                        mobile=False)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def screenshot(self, path: Path) -> None:
        answer = await self.call("Page.captureScreenshot", format="png")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(answer["data"]))


def browser_program() -> str:
    """Return the browser of this machine; without one CI fails, and elsewhere the test is left out."""
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        assert os.environ.get("CI") != "true", f"no browser is installed; install one of {', '.join(BROWSERS)}"
        pytest.skip(f"no browser is installed; install one of {', '.join(BROWSERS)}")
    return program


@contextlib.asynccontextmanager
async def browser_page(folder: Path) -> AsyncIterator[BrowserPage]:
    """Start a browser with a profile of its own, and open an empty page."""
    program = browser_program()
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
               "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={folder}"]  # fmt: skip
    port = folder / "DevToolsActivePort"
    process = subprocess.Popen([program, *options, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               start_new_session=True)  # fmt: skip
    try:
        eventually(lambda: port.exists() and port.read_text().count("\n"), within=30, what="the browser")
        opened = httpx.put(f"http://127.0.0.1:{port.read_text().split()[0]}/json/new?about:blank", timeout=patient(30))
        socket = await websocket_connect(opened.json()["webSocketDebuggerUrl"], max_message_size=1 << 27)
        try:
            yield BrowserPage(socket)
        finally:
            socket.close()
            while await asyncio.wait_for(socket.read_message(), patient(30)) is not None:
                pass  # until the browser has closed its end
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(patient(30))
