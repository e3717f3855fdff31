"""Temporary folders of runs: gone with them, and what a killed one left with the next."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from graphkiln_backend.scoring import scratch
from graphkiln_backend.scoring.scratch import Scratch, remove_dead_scratch, scratch_folder
from graphkiln_backend.system.owned_folder import OwnedFolder

DIE = """
import os, sys
from pathlib import Path
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
parent = Path(sys.argv[1])
folders = [*(scratch_folder(each, parent) for each in Scratch), OwnedFolder(parent)]
(folders[0].path / "plan").write_text("large")
print(*(folder.path for folder in folders), flush=True)
os._exit(9)
"""


@pytest.fixture(autouse=True)
def _temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(scratch, "MACHINE_TMP", tmp_path / "machine")
    (tmp_path / "machine").mkdir()


@pytest.mark.parametrize("place", ["", "machine"])
def test_what_a_killed_run_left_goes_and_nothing_else(tmp_path: Path, place: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", DIE, str(tmp_path / place)], capture_output=True, text=True, check=False, timeout=60
    )
    *left, servers = map(Path, ended.stdout.split())
    assert len(left) == len(Scratch)
    with scratch_folder(Scratch.PLAN, tmp_path / place) as living:
        remove_dead_scratch()
        assert living.path.is_dir()
    assert not any(path.exists() for path in left)
    assert servers.is_dir(), "of a server more is to be removed than its folder, which its next start does"


def test_a_folder_says_what_it_is_for() -> None:
    with scratch_folder(Scratch.RAY) as folder:
        assert folder.path.name.startswith("graphkiln-ray-")
        assert isinstance(folder, OwnedFolder)
    assert not folder.path.exists()
