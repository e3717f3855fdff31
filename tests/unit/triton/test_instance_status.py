"""The status files of instances: published whole, read while they come and go."""

from __future__ import annotations

from pathlib import Path

import pytest
from statuses import instance_status

from graphkiln_backend.triton.instance_status import StatusFile, read_counters, read_statuses

STATUS = instance_status()


def test_counts_what_is_computing(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "m_0", STATUS)
    assert read_statuses(tmp_path) == [STATUS]
    with file.computing:
        assert read_counters(tmp_path) == {"m_0.1": (1, 0)}
    assert read_counters(tmp_path) == {"m_0.1": (1, 1)}
    file.close()
    assert list(tmp_path.iterdir()) == []


def test_an_instance_that_ends_late_leaves_its_successor_alone(tmp_path: Path) -> None:
    successor_status = instance_status(pid=STATUS.pid + 1)
    ending = StatusFile(tmp_path, "m_0", STATUS)
    successor = StatusFile(tmp_path, "m_0", successor_status)
    ending.close()
    assert read_statuses(tmp_path) == [successor_status]
    with successor.computing:
        assert list(read_counters(tmp_path).values()) == [(1, 0)]
    successor.close()


def test_a_failed_batch_is_over_too(tmp_path: Path) -> None:
    file = StatusFile(tmp_path, "m_0", STATUS)
    with pytest.raises(ZeroDivisionError), file.computing:
        _ = 1 / 0
    assert read_counters(tmp_path) == {"m_0.1": (1, 1)}
    file.close()


def test_publishes_nothing_without_a_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRAPHKILN_RUN_FOLDER", raising=False)
    assert StatusFile.publish("m_0", STATUS) is None
