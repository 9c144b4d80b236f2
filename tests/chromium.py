"""A headless Chromium, driven through its debugging protocol (https://chromedevtools.github.io/devtools-protocol/)."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OPTIONS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--remote-debugging-port=0")


class Tab:
    """A page that is open. `errors` holds what its console and its scripts complained about."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.socket = socket
        self.errors: list[str] = []
        self.number = 0

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        self.number += 1
        await self.socket.send_json({"id": self.number, "method": method, "params": parameters})
        while True:
            told = await self.socket.receive_json(timeout=60)
            if told.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"):
                self.errors.append(str(told["params"]))
            if told.get("id") == self.number:
                assert "error" not in told, (method, told["error"])
                return told["result"]

    async def evaluate(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def load(self, path: Path, width: int = 1280, scheme: str = "light", media: str = "screen") -> None:
        """Open a file in a window `width` pixels wide, and wait until it is drawn."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False
        )
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", media=media, features=features)
        await self.evaluate("window.left = true")
        await self.call("Page.navigate", url=path.as_uri())
        ready = f"document.readyState == 'complete' && !window.left && location.href == {path.as_uri()!r}"
        until = time.monotonic() + 60
        while not await self.evaluate(ready):
            assert time.monotonic() < until, "the page does not load"
            await asyncio.sleep(0.05)

    async def screenshot(self, path: Path, whole: bool = True) -> None:
        shot = await self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def tab(profile: Path) -> AsyncIterator[Tab]:
    """Start a browser whose files are in `profile`, and open an empty page."""
    assert PROGRAM is not None
    process = subprocess.Popen([PROGRAM, *OPTIONS, f"--user-data-dir={profile}"], stderr=subprocess.DEVNULL)
    try:
        port = profile / "DevToolsActivePort"
        until = time.monotonic() + 60
        while not (port.exists() and port.read_text().count("\n")):
            assert time.monotonic() < until, "the browser does not start"
            await asyncio.sleep(0.05)
        address = f"http://127.0.0.1:{port.read_text().split()[0]}"
        async with aiohttp.ClientSession() as session:
            async with session.put(f"{address}/json/new?about:blank") as answer:
                opened = await answer.json()
            async with session.ws_connect(opened["webSocketDebuggerUrl"], max_msg_size=1 << 28) as socket:
                found = Tab(socket)
                for part in ("Page", "Runtime", "Log"):
                    await found.call(f"{part}.enable")
                yield found
    finally:
        process.kill()
        process.wait()
