"""Reports in a real browser: no overflow, no text outside of its chart, legible letters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from axe_playwright_python.sync_playwright import Axe
from browsing import CHROMIUM, browse
from digits_subject import digits_subject
from page_browser import chromium
from playwright.sync_api import Browser
from recorded import write_record
from running import run_here
from stories import make_observation, story_document
from tuned import document

from graphkiln.story.report import render_page as render_story
from graphkiln.tuning.report import render_page as render_search

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")]

COUNTED = {"charts": "svg", "tables": "table", "marks": "rect, circle"}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


def story(_: Path, __: Path) -> str:
    rates = {"eager": 1.0, "static": 1.25, "reduced": 3.0, "int8": 9.0}
    return render_story(story_document(**{key: make_observation(rate) for key, rate in rates.items()}))


def search(repository: Path, folder: Path) -> str:
    return render_search(document(digits_subject(repository), folder))


def replay(repository: Path, folder: Path) -> str:
    """Report with pictures of requests whose class changed."""
    images = np.random.default_rng(0).normal(0, 1, (4, 1, 1, 32, 32)).astype(np.float32)
    wrong = np.full((1, 10), -1, np.float32)
    write_record(folder / "record", [({"INPUT_0": image}, {"OUTPUT_0": wrong}) for image in images], model="digits")
    model = repository / "model_repository" / "digits"
    run_here("replay", folder / "record", "--model", model, "--cache=off", "--html", folder / "replay.html")
    return (folder / "replay.html").read_text()


@pytest.mark.parametrize("width", [320, 2560])
def test_pictures_of_a_replay_do_not_overflow(width: int, repository: Path, tmp_path: Path) -> None:
    shown = browse(replay(repository, tmp_path), tmp_path, width, {"pictures": "img", "tables": "table"})
    assert (shown["overflow"], shown["outside"], shown["pictures"], shown["tables"]) == (0, [], 4, 2)


@pytest.mark.parametrize("width", [335, 1280])
@pytest.mark.parametrize("make", [story, search], ids=lambda make: make.__name__)
def test_report_is_legible_on_phone_and_screen(
    make: Callable[[Path, Path], str], width: int, repository: Path, tmp_path: Path
) -> None:
    shown = browse(make(repository, tmp_path), tmp_path, width, COUNTED)
    assert (shown["overflow"], shown["outside"]) == (0, [])
    assert shown["smallest"] >= 10, "letters in a chart, in pixels"
    assert shown["marks"] > shown["charts"] > 0
    assert shown["tables"] >= shown["charts"], "every chart has its table"


@pytest.mark.parametrize("look", [("light", 1280), ("dark", 335)], ids=str)
@pytest.mark.parametrize("make", [story, search, replay], ids=lambda make: make.__name__)
def test_axe_finds_no_violation(
    make: Callable[[Path, Path], str], look: tuple[str, int], browser: Browser, repository: Path, tmp_path: Path
) -> None:
    scheme, width = look
    (tmp_path / "report.html").write_text(make(repository, tmp_path))
    scheme_: Any = scheme
    with browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme_) as page:
        page.goto((tmp_path / "report.html").as_uri())
        found = Axe().run(page).response["violations"]
    assert [f"{fault['id']}: {fault['nodes'][0]['html'][:200]}" for fault in found] == []
