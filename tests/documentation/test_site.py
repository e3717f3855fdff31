"""The site of docs/, built and searched without a network."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from page_browser import PATIENCE_MS, chromium
from playwright.sync_api import Route, expect

from documenting.site import foreign_resources

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NO_NETWORK = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")


@pytest.fixture(scope="module")
def site(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, **NO_NETWORK, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=repository, env=environment, check=True)
    return folder


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Log no requests."""


@pytest.fixture
def url(site: Path) -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_no_external_resources(site: Path) -> None:
    assert len([*site.rglob("*.html")]) > 30
    assert foreign_resources(site) == []


@pytest.mark.parametrize("width", [335, 1280])
def test_search_and_anchors_without_network(url: str, width: int) -> None:
    external: list[str] = []

    def keep_out(route: Route) -> None:
        external.append(route.request.url)
        route.abort()

    with chromium() as browser:
        page = browser.new_context(viewport={"width": width, "height": 900}).new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.route(lambda address: not address.startswith((url, "blob:", "data:")), keep_out)
        page.goto(f"{url}index.html")
        page.keyboard.press("s")  # the theme's key for its search
        page.fill(".md-search__input", "calibration")
        expect(page.locator(".md-search-result__link").first).to_be_visible(timeout=PATIENCE_MS)
        page.goto(f"{url}tutorial.html#4-serve")
        expect(page.locator("h2[id='4-serve']")).to_be_in_viewport(timeout=PATIENCE_MS)
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wide) == 0
    assert external == []


# Home; commands and Python; tables; docstrings.
@pytest.mark.parametrize("name", ["index", "how-to/requests", "benchmarks", "reference/python"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_violation(url: str, name: str, scheme: Literal["light", "dark"]) -> None:
    with chromium() as browser:
        page = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme=scheme).new_page()
        page.set_default_timeout(PATIENCE_MS)
        page.goto(f"{url}{name}.html")
        found = Axe().run(page).response["violations"]
    assert [f"{fault['id']}: {fault['nodes'][0]['html'][:200]}" for fault in found] == []


def test_404_page_finds_its_files_below_a_path(repository: Path, tmp_path: Path) -> None:
    built = tmp_path / "graphkiln"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(built)]
    environment = {**os.environ, **NO_NETWORK, "NO_MKDOCS_2_WARNING": "1", "SITE_URL": "https://docs.example/graphkiln"}
    subprocess.run(command, cwd=repository, env=environment, check=True)
    found = re.findall(r'(?:href|src)="(/[^"#?]*)', (built / "404.html").read_text())
    assert len(found) > 20
    assert [each for each in found if not (tmp_path / each.lstrip("/")).exists()] == []
    assert foreign_resources(built) == []
