"""Six journeys of new users, each a script in this folder, in an empty folder against the real server.

`scripts/journeys` runs them in a fresh container. With `GRAPHKILN_RECORD=1` and `-n 0`, their times are written into
`docs/journeys.json`, from which `scripts/docs` generates the page.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import journey as journeys
import manual
import pytest
from journey import Journey
from walkthrough import Walkthrough

from graphkiln.story.variants import machine_facts
from graphkiln_client import Client

NAMES = ("triton_store", "pytorch", "int8", "tune", "score", "upgrade")
QUICKER = {"--p99 50ms": "--p99 2s", "--budget 1m": "--budget 15s"}
SLOW = (pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800))


@pytest.fixture(scope="module")
def trained(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module, the weights and the images of the tutorial."""
    folder = tmp_path_factory.mktemp("trained")
    with Walkthrough(folder) as reader:
        for block in manual.blocks(repository / "docs" / "tutorial.md"):
            if block.title or block.commands == ["python digits.py"]:
                reader.do(block)
    return folder


def prepare(name: str, reader: Walkthrough, repository: Path, trained: Callable[[], Path]) -> None:
    """Provide the files of the user before the first command."""
    if name in ("triton_store", "score", "upgrade"):
        reader.bring(repository, "model_repository")
    if name == "triton_store":
        (block,) = [each for each in manual.blocks(repository / "docs/how-to/drop-in.md") if each.language == "python"]
        reader.do(block)
    if name == "score":
        shutil.copytree(repository / "docs" / "digits", reader.folder / "photos")
    if name == "upgrade":
        shutil.copytree(reader.folder / "model_repository" / "digits", reader.folder / "models" / "digits")
    if name in ("pytorch", "int8", "tune"):
        shutil.copytree(trained(), reader.folder, dirs_exist_ok=True)
    if name == "tune":
        reader.run(Journey.read("pytorch").commands[0])
    reader.steps.clear()


@pytest.mark.parametrize("name", [pytest.param(name, marks=SLOW) for name in NAMES])
def test_a_journey(name: str, repository: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    journey = Journey.read(name)
    with Walkthrough(tmp_path, {} if os.environ.get("GRAPHKILN_RECORD") else QUICKER) as reader:
        prepare(name, reader, repository, lambda: request.getfixturevalue("trained"))
        begun = time.monotonic()
        for command in journey.commands:
            reader.run(command)
        reader.wait()
        check_result(name, reader)
    seconds = time.monotonic() - begun
    if os.environ.get("GRAPHKILN_RECORD"):
        journeys.record(repository / "docs" / "journeys.json", journey, reader.steps, seconds, machine_facts())


def check_result(name: str, reader: Walkthrough) -> None:
    """Check the result of a journey."""
    if name == "triton_store":
        assert reader.printed(r"configured\W+1\W+READY")
        assert reader.printed(r"bare\W+1\W+READY")
    if name in ("pytorch", "int8"):
        assert reader.printed("seven")
    if name == "int8":
        assert reader.printed("int8")
    if name == "tune":
        assert reader.printed("50 requests per second")
    if name == "score":
        assert reader.printed(r"answers is whole: 5 rows = 5 scored \+ 0 errors")
    if name == "upgrade":
        assert reader.server
        with Client(reader.server.url) as client:
            found = client.model("digits", "2").statistics()
        assert found["inference_stats"]["success"]["count"] > 0, "callers were answered by the new version"


def test_every_script_is_a_journey() -> None:
    assert {path.stem for path in journeys.FOLDER.glob("*.sh")} == {*NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_a_journey_has_few_commands_all_from_its_page(name: str, repository: Path) -> None:
    journey = Journey.read(name)
    assert 1 <= len(journey.commands) <= journeys.MOST_COMMANDS
    blocks = [block for block in manual.blocks(repository / "docs" / journey.page) if block.language == "bash"]
    shown = {line for block in blocks for line in block.commands}
    assert [command for command in journey.commands if command not in shown] == []


def test_the_record_has_these_journeys(repository: Path) -> None:
    document = json.loads((repository / "docs" / "journeys.json").read_text())
    kept = {each["name"]: [step["command"] for step in each["commands"]] for each in document["journeys"]}
    assert kept == {name: list(Journey.read(name).commands) for name in NAMES}
    assert all(each["seconds"] > 0 for each in document["journeys"])


def test_the_tutorial_has_the_time_of_its_commands(repository: Path) -> None:
    page = repository / "docs" / "tutorial.md"
    tutorial = json.loads((repository / "docs" / "journeys.json").read_text())["tutorial"]
    found = re.search(r"the commands took (\d+) minutes", page.read_text())
    assert found
    assert int(found[1]) == math.ceil(tutorial["seconds"] / 60) <= 15
    blocks = [block for block in manual.blocks(page) if not block.title and block.language in ("bash", "python")]
    shown = [line for block in blocks for line in (block.commands if block.language == "bash" else [journeys.PROGRAM])]
    assert [step["command"] for step in tutorial["commands"]] == shown
