"""The page in Debian's Chromium, served on a free port; faults are collected."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from browsing import CHROMIUM
from playwright.sync_api import Browser, Page, sync_playwright
from running import free_ports
from starlette.types import ASGIApp

# A busy machine must not fail a property that holds.
PATIENCE_MS = 60_000


@contextmanager
def serving(app: ASGIApp) -> Iterator[str]:
    """Serve an application in a thread until the end of the block; the value is its address."""
    (port,) = free_ports(1)
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def chromium() -> Iterator[Browser]:
    """Run Debian's Chromium without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        try:
            yield browser
        finally:
            browser.close()


@dataclass
class Opened:
    """An open page.

    Attributes:
        page: As Playwright drives it.
        faults: Errors of scripts, violations of the content security policy, and dialogs, which only an injected
            script would open.
    """

    page: Page
    faults: list[str] = field(default_factory=list)

    def ask(self, *files: str | dict[str, Any]) -> None:
        """Choose files, as in the file dialog."""
        self.page.set_input_files("#files", list(files))

    def wait_for(self, selector: str, text: str = "") -> Any:
        """Wait for the first element that matches the selector and has the text."""
        found = self.page.locator(selector, has_text=text).first
        found.wait_for(state="visible")
        return found


@contextmanager
def opened(browser: Browser, url: str, *, width: int = 1280, scheme: str = "light", **options: Any) -> Iterator[Opened]:
    """Open the page in a separate context; at the end there must have been no fault.

    Args:
        browser: Where.
        url: Of the page.
        width: Of the window in pixels.
        scheme: `light` or `dark`.
        options: Of `Browser.new_context`.
    """
    scheme_: Any = scheme
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme_, **options)
    context.set_default_timeout(PATIENCE_MS)
    page = context.new_page()
    it = Opened(page)
    page.on("pageerror", lambda error: it.faults.append(str(error)))
    page.on("console", lambda message: _note(it, message.type, message.text))
    page.on("dialog", lambda dialog: (it.faults.append(f"dialog: {dialog.message}"), dialog.dismiss()))
    page.goto(url)
    page.wait_for_selector("#model option", state="attached")
    try:
        yield it
    finally:
        context.close()
    assert it.faults == [], it.faults


def _note(opened: Opened, kind: str, text: str) -> None:
    """Record console errors other than failed responses."""
    if kind in ("error", "warning") and "Failed to load resource" not in text:
        opened.faults.append(text)
