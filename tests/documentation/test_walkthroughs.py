"""The tutorial and the guides, executed from top to bottom with real servers in an empty folder."""

from __future__ import annotations

import json
import os
import shutil
import time
from contextlib import ExitStack
from pathlib import Path

import journey
import manual
import pytest
from oci_server import OciServer
from walkthrough import Walkthrough

from graphkiln.story.variants import machine_facts

pytestmark = [pytest.mark.server, pytest.mark.slow, pytest.mark.timeout(1800)]

# Targets that any machine meets, in less time.
QUICKER = {
    "--p99 50ms": "--p99 2s",
    "--budget 1m": "--budget 15s",
    "--only max_batch_size": "--only spin",
    "--duration 20": "--duration 12",
}
# Words that commands of a guide print.
PRINTED = {"how-to/rollout": (r"changed: Counter\(\{'9': 1\d", r"version 2 was aborted", r"digits\W+3\W+READY")}
# Files that the reader has beside a checkout: source and name.
GIVEN = {"scoring": ("docs/digits", "photos"), "signing": ("model_repository/digits", "models/digits")}


def test_the_tutorial(repository: Path, tmp_path: Path) -> None:
    """With `GRAPHKILN_RECORD=1`, the times of its commands are saved like those of the journeys."""
    is_recorded, begun = bool(os.environ.get("GRAPHKILN_RECORD")), time.monotonic()
    with Walkthrough(tmp_path, {} if is_recorded else QUICKER) as reader:
        reader.follow(repository / "docs" / "tutorial.md")
        assert reader.printed(r"right on held-out digits: (9[0-9]|100)\.\d%")
        assert reader.printed(r"PASS")
        assert reader.printed(r"(9[0-9]|100)\.\d% of 300 right")
        assert reader.printed(r"digits\W+2\W+READY")
        assert reader.printed(r"graphkiln_instance_info\{")
        manifest = json.loads((tmp_path / "models" / "digits" / "1" / "manifest.json").read_text())
        assert manifest["verification"]
        assert not (tmp_path / "models" / "digits" / "2").exists()
    if is_recorded:
        seconds = time.monotonic() - begun
        journey.record_tutorial(repository / "docs" / "journeys.json", reader.steps, seconds, machine_facts())


@pytest.mark.parametrize("name", manual.GUIDES)
def test_a_guide(name: str, repository: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_STATE", str(tmp_path / ".state"))
    with ExitStack() as stack:
        edits = dict(QUICKER)
        if name == "how-to/push":
            edits["localhost:5000"] = stack.enter_context(OciServer(tmp_path / ".registry")).host
        reader = stack.enter_context(Walkthrough(tmp_path, edits).bring(repository, "docs", "model_repository"))
        (tmp_path / "tests").symlink_to(repository / "tests")
        if name in GIVEN:
            source, target = GIVEN[name]
            shutil.copytree(repository / source, tmp_path / target)
        reader.follow(repository / "docs" / f"{name}.md")
        assert reader.steps
        assert [each for each in PRINTED.get(name, ()) if not reader.printed(each)] == []
