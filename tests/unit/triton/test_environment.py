"""Environment variables of instances: written by the supervisor, read by an instance."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.store import DEFAULT_LIMIT_BYTES
from graphkiln_backend.lowering.settings import Override, parse_override
from graphkiln_backend.triton import environment
from graphkiln_backend.triton.environment import (
    Overrides,
    instances_folder,
    open_cache,
    overrides_for,
    replay_interval_s,
    shared_folder,
    to_environment,
)


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
