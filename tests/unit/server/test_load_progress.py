"""One row for each version, of its slowest instance."""

from __future__ import annotations

import time

from statuses import instance_status

from graphkiln_backend.server.load_progress import load_progress
from graphkiln_backend.triton.instance_status import Loading
from graphkiln_backend.triton.snapshot import Snapshot


def loading(model: str, version: int, seconds: float, activity: str = "lowering") -> Loading:
    return Loading(pid=1, model=model, version=version, since=time.monotonic() - seconds, activity=activity)


def test_nothing_is_loaded_yet() -> None:
    assert load_progress(Snapshot()) == []


def test_versions_by_name_and_number() -> None:
    seen = Snapshot(
        statuses={"a.1": instance_status(model="b", version=3, load_ms=1500.0)},
        loading={"c.2": loading("b", 10, 5, "proving"), "d.3": loading("a", 1, 1)},
    )
    rows = load_progress(seen)
    assert [(row.model, row.version, row.activity) for row in rows] == [
        ("a", 1, "lowering"),
        ("b", 3, "ready"),
        ("b", 10, "proving"),
    ]
    assert rows[1].seconds == 1.5
    assert 5 <= rows[2].seconds < 60
    assert [row.is_ready for row in rows] == [False, True, False]


def test_one_is_ready_when_all_of_its_instances_are() -> None:
    ready = {"m_0.1": instance_status(model="m", version=1, load_ms=90.0)}
    seen = Snapshot(statuses=ready, loading={"m_1.2": loading("m", 1, 2), "m_2.3": loading("m", 1, 7)})
    (row,) = load_progress(seen)
    assert not row.is_ready
    assert row.seconds > 6
    both = {**ready, "m_1.2": instance_status(model="m", version=1, load_ms=900.0)}
    assert [row.seconds for row in load_progress(Snapshot(statuses=both))] == [0.9]


def test_one_whose_process_was_killed_says_so() -> None:
    gone = Loading(pid=2**22 + 1, model="m", version=1, since=time.monotonic(), activity="proving")
    seen = Snapshot(loading={"m_0.1": gone}, crashes={"m_0.1": "Fatal Python error: Segmentation fault\n"})
    (row,) = load_progress(seen)
    assert row.activity == "the process that loaded it was killed by SIGSEGV while it did this: proving"
    assert not row.is_ready
