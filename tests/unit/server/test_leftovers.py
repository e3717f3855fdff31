"""Leftovers of dead runs are removed, and nothing else."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from graphkiln_backend.server import run_folder
from graphkiln_backend.server.run_folder import (
    RunFolder,
    find_leftovers,
    living_runs,
    region_owner,
    remove_leftovers,
)

DIE = """
import os, sys, tempfile
from pathlib import Path
from graphkiln_backend.server import run_folder
tempfile.tempdir = sys.argv[1]
run_folder.SHARED_MEMORY = Path(sys.argv[2])
folder = run_folder.RunFolder()
(folder.shared / "weights").write_bytes(b"x" * 1000)
Path(sys.argv[2], folder.shared_memory_prefix + "region").write_bytes(b"x")
print(folder.path, flush=True)
os._exit(9)
"""


@pytest.fixture(autouse=True)
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another folder for shared memory: servers of other tests remove leftovers in /dev/shm."""
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(run_folder, "SHARED_MEMORY", folder)
    return folder


def die(parent: Path) -> Path:
    """The folder of a run whose supervisor was killed."""
    command = [sys.executable, "-c", DIE, str(parent), str(run_folder.SHARED_MEMORY)]
    finished = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert finished.returncode == 9, finished.stderr
    return Path(finished.stdout.strip())


def regions_of(run: Path) -> list[Path]:
    return sorted(run_folder.SHARED_MEMORY.glob(f"*{run.name}*"))


def test_so_is_what_tritons_python_backend_made(tmp_path: Path) -> None:
    for remove_folder_first in (True, False):
        dead = die(tmp_path)
        environments = Path(f"/tmp/gk-{dead.name.removeprefix('graphkiln-')}aB3xYz")
        (environments / "unpacked").mkdir(parents=True)
        parents = [tmp_path if remove_folder_first else tmp_path / "elsewhere"]
        remove_leftovers(parents)
        assert not environments.exists()


def test_what_a_killed_supervisor_left_is_found_and_removed(tmp_path: Path, logged: list[str]) -> None:
    dead = die(tmp_path)
    assert len(regions_of(dead)) == 3
    found = find_leftovers([tmp_path])
    assert found == [dead, region_owner(dead.name)]
    assert dead.is_dir()
    assert remove_leftovers([tmp_path]) == found
    assert not dead.exists()
    assert regions_of(dead) == []
    assert logged[-1].startswith("removed the leftovers")
    assert not find_leftovers([tmp_path])


def test_so_are_models_whose_files_came_with_a_request(tmp_path: Path) -> None:
    dead, sent = die(tmp_path), Path(f"/tmp/folder{os.getpid() % 1_000_000:06d}")
    sent.mkdir()
    (dead / "shared" / "sent").mkdir()
    (dead / "shared" / "sent" / sent.name).symlink_to(sent)
    remove_leftovers([tmp_path])
    assert not sent.exists()


def test_a_living_run_is_left_alone(tmp_path: Path, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RunFolder() as run:
        region = shared / f"{run.shared_memory_prefix}region"
        region.touch()
        assert remove_leftovers([tmp_path]) == []
        assert run.path.is_dir()
        assert region.exists()
        assert living_runs([tmp_path]) == [run.path]
    assert living_runs([tmp_path]) == []
    assert not region.exists()


def test_regions_go_also_where_the_folder_is_not_to_be_seen(tmp_path: Path) -> None:
    """Containers may share /dev/shm and have a /tmp each."""
    dead = die(tmp_path)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    assert remove_leftovers([elsewhere]) == [region_owner(dead.name)]
    assert regions_of(dead) == []
    assert dead.is_dir()


def test_regions_of_a_run_whose_folder_is_not_to_be_seen_are_left_alone_while_it_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    with RunFolder() as run:
        remove_leftovers([elsewhere])
        assert region_owner(run.path.name).exists()


def test_folders_without_an_owner_file_are_left_alone(tmp_path: Path, shared: Path) -> None:
    mine = tmp_path / "graphkiln-mine"
    mine.mkdir()
    region = shared / f"graphkiln-client-{os.getpid()}-test"
    region.touch()
    assert not remove_leftovers([tmp_path])
    assert mine.is_dir()
    assert region.exists()


def test_two_starts_at_once_remove_a_run_once(tmp_path: Path) -> None:
    dead = [die(tmp_path) for _ in range(3)]
    removed: list[Path] = []
    starts = [threading.Thread(target=lambda: removed.extend(remove_leftovers([tmp_path]))) for _ in range(4)]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert {path for path in removed if path.parent == tmp_path} == {*dead}
    assert len(removed) == 6
    assert not any(path.exists() for path in dead)


def test_a_process_that_still_runs_for_a_dead_run_is_ended_and_no_other(tmp_path: Path) -> None:
    dead = die(tmp_path)
    environment = {**os.environ, "GRAPHKILN_RUN_FOLDER": str(dead / "instances")}
    other = {**os.environ, "GRAPHKILN_RUN_FOLDER": str(tmp_path / "graphkiln-other" / "instances")}
    with (
        subprocess.Popen(["sleep", "60"], env=environment) as left,
        subprocess.Popen(["sleep", "60"], env=other) as kept,
    ):
        try:
            psutil.Process(left.pid).suspend()  # as an instance that hangs
            remove_leftovers([tmp_path])
            assert not psutil.pid_exists(left.pid)  # it was waited for, too
            assert kept.poll() is None
        finally:
            left.kill()
            kept.kill()


def test_a_folder_that_cannot_be_removed_stops_no_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = die(tmp_path)
    monkeypatch.setattr("graphkiln_backend.server.run_folder.remove_owned", lambda _: None)
    assert dead not in remove_leftovers([tmp_path])
    monkeypatch.undo()
    remove_leftovers([tmp_path])
    assert not dead.exists()


def test_regions_that_cannot_be_removed_keep_their_owner_for_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a folder that an instance, about to die, still writes into."""
    dead = die(tmp_path)
    monkeypatch.setattr(run_folder.shutil, "rmtree", lambda *_, **__: None)
    assert region_owner(dead.name) not in remove_leftovers([tmp_path])
    assert region_owner(dead.name).exists()


def test_runs_below_a_dead_owner_go_with_it(tmp_path: Path) -> None:
    search = die(tmp_path)
    run = die(search)
    remove_leftovers([tmp_path])
    assert not search.exists()
    assert regions_of(run) == []
