"""Pools of threads that get smaller where there are many, and limits that are too low for a start."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import limits as module
from graphkiln_backend.server.limits import check_threads, pool_size


@pytest.mark.parametrize(("instances", "threads"), [(1, 32), (32, 32), (64, 16), (400, 8), (0, 32)])
def test_pools_of_many_are_small(instances: int, threads: int) -> None:
    assert pool_size(instances) == threads


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """What groups allow: nothing is limited until a test says so."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(module, "_allowed_by_groups", lambda: found)
    monkeypatch.setattr(module, "_allowed_to_user", lambda: ())
    return found


def test_too_few_are_an_error_with_the_way_out(allowed: list[tuple[int, str]]) -> None:
    check_threads(400)
    allowed.append((2048, "podman run --pids-limit=0"))
    check_threads(40)
    with pytest.raises(ServerSetupError, match=r"400 model instances need 8050 threads .* and 2048 more") as caught:
        check_threads(400)
    assert caught.value.hint.startswith("podman run --pids-limit=0; or fewer models")


def test_groups_on_the_way_count(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/pod/container\n")
    inner = tmp_path / "cgroup" / "pod" / "container"
    inner.mkdir(parents=True)
    (inner / "pids.max").write_text("max\n")
    (inner.parent / "pids.max").write_text("1000\n")
    (inner.parent / "pids.current").write_text("400\n")
    groups = module._allowed_by_groups(tmp_path / "cgroup", tmp_path / "own")
    assert [count for count, _ in groups] == [600]


def test_the_limit_of_a_user_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 300)]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert [count for count, _ in module._allowed_to_user()] == [300]
    assert limits[-1] == (300, 300)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert list(module._allowed_to_user()) == []
