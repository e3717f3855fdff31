"""Environment variables of instances; leftover folders of models sent in a request."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.store import DEFAULT_LIMIT_BYTES
from graphkiln_backend.lowering.settings import Override, parse_override
from graphkiln_backend.triton import environment, sent_models
from graphkiln_backend.triton.environment import (
    SHARED_FOLDER_VARIABLE,
    Overrides,
    instances_folder,
    open_cache,
    overrides_for,
    replay_interval_s,
    shared_folder,
    to_environment,
)
from graphkiln_backend.triton.sent_models import NOTES, note_sent, remove_sent


@pytest.fixture(autouse=True)
def _no_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in vars(environment):
        if name.endswith("_VARIABLE"):
            monkeypatch.delenv(getattr(environment, name), raising=False)


def put(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    overrides: Overrides | None = None,
    cache: CacheSettings | None = None,
) -> None:
    """Set an instance's environment as the supervisor does."""
    settings = cache or CacheSettings()
    variables = to_environment(folder / "instances", folder / "shared", overrides or {}, settings)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


def test_folders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(monkeypatch, tmp_path / "with space")
    assert instances_folder() == tmp_path / "with space" / "instances"
    assert shared_folder() == tmp_path / "with space" / "shared"


def test_without_supervisor_nothing_is_set() -> None:
    assert instances_folder() is None
    assert shared_folder() is None
    assert overrides_for("m") == []


def test_overrides_keep_their_order(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    first, second = parse_override("precision=bf16"), parse_override('session.a=b=ü "c"')
    put(monkeypatch, tmp_path, {"m": [first, second], "other": [parse_override("threads=1")]})
    assert overrides_for("m") == [first, second]
    assert [type(override) for override in overrides_for("m")] == [Override, Override]
    assert overrides_for("n") == []


def test_configured_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(monkeypatch, tmp_path, cache=CacheSettings(folder=tmp_path / "cache", limit_bytes=7))
    with open_cache() as cache:
        assert cache.folder == tmp_path / "cache"
        assert cache._limit_bytes == 7


def test_disabled_cache_is_in_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    put(monkeypatch, tmp_path)
    with open_cache() as cache:
        assert cache.folder == tmp_path / "shared" / "artifacts"


def test_without_supervisor_a_temporary_cache_is_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with open_cache() as cache:
        assert cache.folder == tmp_path / f"graphkiln-{os.getpid()}" / "artifacts"
        assert cache._limit_bytes == DEFAULT_LIMIT_BYTES


def test_replay_interval(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert replay_interval_s() == 600
    variables = to_environment(tmp_path, tmp_path, {}, CacheSettings(), replay_interval_s=0.5)
    monkeypatch.setenv("GRAPHKILN_REPLAY_INTERVAL", variables["GRAPHKILN_REPLAY_INTERVAL"])
    assert replay_interval_s() == 0.5


# The memory limit, in separate processes.

UNLIMITED = -1


@pytest.mark.parametrize(("hard", "expected"), [(UNLIMITED, UNLIMITED), (4 << 30, 4 << 30)])
def test_memory_limit_is_raised_to_the_hard_limit(hard: int, expected: int) -> None:
    program = f"""
import resource
from graphkiln_backend.triton.environment import lift_memory_limit
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, {hard}))
lift_memory_limit()
print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(finished.stdout) == expected


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder shared by instances."""
    monkeypatch.setenv(SHARED_FOLDER_VARIABLE, str(tmp_path))
    return tmp_path


@pytest.fixture
def sent() -> Iterator[Path]:
    """A model in a folder like Triton's."""
    folder = Path(f"/tmp/folder{os.getpid() % 1_000_000:06d}")
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.onnx").write_bytes(b"x")
    yield folder
    if folder.exists():
        (folder / "1" / "model.onnx").unlink()
        (folder / "1").rmdir()
        folder.rmdir()


def test_all_threads_but_those_of_the_stub_run_on_idle_cores() -> None:
    """In a process that ends: without privileges there is no way back."""
    script = """if True:
        import ctypes, os, threading, time
        from graphkiln_backend.triton.environment import native_threads, run_on_idle_cores
        libc, helper = ctypes.CDLL(None), ctypes.c_ulong()
        libc.pthread_create(ctypes.byref(helper), None, libc.sleep, ctypes.c_void_p(60))
        (spared,) = native_threads()
        running, ended = threading.Event(), threading.Event()
        def begin_others():
            while not ended.is_set():  # threads appear during the pass
                running.set()
                threading.Thread(target=time.sleep, args=(0.05,)).start()
                time.sleep(0.001)
        threading.Thread(target=begin_others).start()
        running.wait()
        run_on_idle_cores({spared})
        for _ in range(2):
            classes = []
            for thread in {*os.listdir("/proc/self/task")} - {str(spared)}:
                try:
                    classes.append(os.sched_getscheduler(int(thread)))
                except ProcessLookupError:
                    pass
            print(len(classes) > 1, {*classes} == {os.SCHED_IDLE}, os.sched_getscheduler(spared) == os.SCHED_OTHER)
            time.sleep(0.2)
        ended.set()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "True True True\n" * 2


def test_sent_model_is_removed(shared: Path, sent: Path) -> None:
    for _ in range(2):  # one for each instance
        note_sent(str(sent))
    remove_sent(shared / NOTES)
    assert not sent.exists()
    assert list((shared / NOTES).iterdir()) == []
    remove_sent(shared / NOTES)


def test_model_of_a_store_is_not_recorded(shared: Path) -> None:
    note_sent(str(shared / "digits"))
    note_sent("/tmp/folder-of-models")
    assert not (shared / NOTES).exists()
    remove_sent(shared / NOTES)


def test_other_folders_are_not_removed(shared: Path, tmp_path: Path) -> None:
    mine = tmp_path / "folderAAAAAA"
    mine.mkdir()
    (shared / NOTES).mkdir()
    (shared / NOTES / mine.name).symlink_to(mine)
    (shared / NOTES / "text").write_text("no link")
    remove_sent(shared / NOTES)
    assert mine.is_dir()


def test_folder_of_another_user_is_not_removed(shared: Path, sent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note_sent(str(sent))
    monkeypatch.setattr(sent_models.os, "geteuid", lambda: os.getuid() + 1)
    remove_sent(shared / NOTES)
    assert sent.is_dir()


def test_folder_removed_by_triton_is_ignored(shared: Path) -> None:
    note_sent("/tmp/folder______")
    remove_sent(shared / NOTES)
    assert list((shared / NOTES).iterdir()) == []


def test_unwritable_record_does_not_prevent_loading(
    sent: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(SHARED_FOLDER_VARIABLE, str(tmp_path / "gone"))
    note_sent(str(sent))
    assert sent.is_dir()
