"""The count of restarts: published by one of all instances, and taken over when that one ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graphkiln_backend.triton.restarts import RESTARTS_FILE, RestartCounts, read_restarts, write_restarts


class Registry:
    """Counters by cause, as Triton adds them up over all instances."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}

    def create(self, cause: str) -> Counter:
        return Counter(self, cause)


class Counter:
    def __init__(self, registry: Registry, cause: str) -> None:
        self._registry, self._cause = registry, cause
        registry.values.setdefault(cause, 0)

    def increment(self, value: float, /) -> None:
        self._registry.values[self._cause] += value

    def __del__(self) -> None:
        del self._registry.values[self._cause]


@pytest.fixture
def registry() -> Registry:
    return Registry()


def write(folder: Path, **counts: int) -> None:
    (folder / RESTARTS_FILE).write_text(json.dumps(counts))


def test_every_cause_is_published(tmp_path: Path, registry: Registry) -> None:
    write(tmp_path, instance_died=2, wrong_outputs=0)
    with RestartCounts(tmp_path, registry.create) as counts:
        counts.publish()
        counts.publish()
        assert registry.values == {"instance_died": 2, "wrong_outputs": 0}


def test_what_is_counted_later_is_added(tmp_path: Path, registry: Registry) -> None:
    with RestartCounts(tmp_path, registry.create) as counts:
        counts.publish()
        assert registry.values == {}
        write(tmp_path, load_deadline=1)
        counts.publish()
        write(tmp_path, load_deadline=3, server_died=1)
        counts.publish()
        assert registry.values == {"load_deadline": 3, "server_died": 1}


def test_one_of_all_instances_publishes(tmp_path: Path, registry: Registry) -> None:
    write(tmp_path, instance_died=2)
    with RestartCounts(tmp_path, registry.create) as first, RestartCounts(tmp_path, registry.create) as second:
        for counts in (first, second, first, second):
            counts.publish()
        assert registry.values == {"instance_died": 2}


def test_another_takes_over_when_it_ends(tmp_path: Path, registry: Registry) -> None:
    write(tmp_path, instance_died=2)
    first, second = RestartCounts(tmp_path, registry.create), RestartCounts(tmp_path, registry.create)
    first.publish()
    second.publish()
    first.close()
    assert registry.values == {}
    second.publish()
    assert registry.values == {"instance_died": 2}
    second.close()
    assert registry.values == {}


def test_nothing_is_left_in_the_folder(tmp_path: Path, registry: Registry) -> None:
    with RestartCounts(tmp_path, registry.create) as counts:
        counts.publish()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_publishes_nothing(tmp_path: Path, registry: Registry) -> None:
    with RestartCounts(tmp_path / "gone", registry.create) as counts:
        counts.publish()
    assert registry.values == {}


@pytest.mark.parametrize("content", ["", "{", "[1"])
def test_half_a_file_is_none(tmp_path: Path, content: str) -> None:
    assert read_restarts(tmp_path) == {}
    (tmp_path / RESTARTS_FILE).write_text(content)
    assert read_restarts(tmp_path) == {}


def test_counts_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_restarts(tmp_path, {"instance_died": 2})
    assert read_restarts(tmp_path) == {"instance_died": 2}
    assert [path.name for path in tmp_path.iterdir()] == [RESTARTS_FILE]
