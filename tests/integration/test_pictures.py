"""Pictures of the documentation, made from the running product; `GRAPHKILN_RECORD=1` saves them in `docs`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pictures
import pytest
from page_browser import chromium, opened
from playwright.sync_api import Browser, expect
from running import Server, Serving, free_ports, run_command

pytestmark = [pytest.mark.server, pytest.mark.slow]

WIDTH = 1100


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def shown(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    (port,) = free_ports(1)
    arguments = ("--model-store", repository / "model_repository", "--page-address", f"127.0.0.1:{port}")
    with Serving(tmp_path_factory.mktemp("pictures"), *arguments) as server:
        server.wait_ready()
        yield server, f"http://127.0.0.1:{port}/"


@pytest.fixture
def docs(repository: Path, tmp_path: Path) -> Path:
    """Folder of the pictures: the documentation only if they are to be recorded."""
    return repository / "docs" if os.environ.get("GRAPHKILN_RECORD") else tmp_path


def test_page(browser: Browser, shown: tuple[Server, str], repository: Path, docs: Path) -> None:
    """A classified digit, and a scene with its detections."""
    with opened(browser, shown[1], width=WIDTH) as it:
        it.page.select_option("#model", "digits/1")
        it.ask(str(repository / "docs" / "digits" / "seven.png"))
        expect(it.wait_for(".bars tbody tr:first-child th")).to_have_text("seven")
        it.page.select_option("#model", "scenes-detector/1")
        it.ask(str(repository / "docs" / "scenes" / "2.png"))
        expect(it.page.locator(".shown canvas")).to_be_visible()
        expect(it.page.locator(".card .times")).to_have_count(2)
        it.page.mouse.move(0, 0)
        pictures.keep("page.png", it.page.screenshot(full_page=True, animations="disabled"), docs)
    assert pictures.fault_of(docs / "page.png") == ""


def test_report(browser: Browser, shown: tuple[Server, str], docs: Path, tmp_path: Path) -> None:
    """The report of `bench --html` of the same server."""
    file = tmp_path / "bench.html"
    words = ("--model", "digits", "--url", shown[0].url, "--concurrency", "1,4", "--duration", "2", "--html", file)
    finished = run_command("bench", *words)
    assert finished.returncode == 0, finished.stderr
    page = browser.new_context(viewport={"width": WIDTH, "height": 900}, color_scheme="light").new_page()
    page.goto(file.as_uri())
    expect(page.locator("#latencies-chart .dot")).to_have_count(2)
    pictures.keep("report.png", page.screenshot(animations="disabled"), docs)
    page.context.close()
    assert pictures.fault_of(docs / "report.png") == ""
