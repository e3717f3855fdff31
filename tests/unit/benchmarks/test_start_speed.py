"""When a process of a server was started is known to a hundredth of a second."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import start_speed
from start_speed import _FIRST, CPP, _begun, _median_first, _peer_rows, _Start, feeds_of, first_requests, ratio_to_later

from graphkiln_backend.graph.errors import ServerError


def test_a_process_began_after_it_was_asked_for() -> None:
    before = time.time()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            after = time.time()
            assert before - 0.05 <= _begun(process.pid) <= after + 0.05
        finally:
            process.kill()


def test_one_request_that_is_held_up_is_not_the_worst_size() -> None:
    rounds = [_Start(first={("m", 1): slow, ("m", 2): 1.4}) for slow in (30.0, 1.1, 1.0)]
    assert _median_first({"digits, warm": rounds}, "digits, warm") == 1.4


def test_first_requests_of_a_peer_have_a_row_where_they_were_made() -> None:
    ours, asked = _Start({"ready": 3.0}, first={("m", 1): 1.5}), _Start({"ready": 2.0}, first={("m", 1): 1.25})
    starts = {"digits, warm": [ours], f"digits, {CPP}": [asked], "digits, bare sessions": [_Start({"ready": 1.0})]}
    rows = {row["phase"]: row["digits, warm"] for row in _peer_rows(CPP, ["digits, warm"], starts)}
    assert rows[f"{CPP}, {_FIRST}"] == 1.25
    assert rows[f"ratio to {CPP}"] == 1.5
    assert not any(_FIRST in str(row["phase"]) for row in _peer_rows("bare sessions", ["digits, warm"], starts))
    assert not [*_peer_rows("not measured", ["digits, warm"], starts)]


# The first request of each batch size beside later ones: a client that stands in for a server counts and waits.

INPUTS = [{"name": "x", "datatype": "FP16", "shape": [-1, 3, -1]}, {"name": "n", "datatype": "INT64", "shape": [-1]}]


class Served:
    """A model whose first request of a size takes three times as long as the later ones, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.asked: list[int] = []
        self.metadata = {"inputs": INPUTS}

    def infer(self, feeds: Mapping[str, Any]) -> None:
        raise ServerError(f"{len(feeds['x'])} rows are too many")

    def repeatable(self, feeds: Mapping[str, Any]) -> Callable[[], None]:
        size = len(feeds["x"])

        def send() -> None:
            self.now += 0.01 * size * (1 if size in self.asked else 3)
            self.asked.append(size)

        return send


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Served:
    served = Served()

    @contextmanager
    def connect(*_: object, **__: object) -> Iterator[Any]:
        yield type("Connected", (), {"model": staticmethod(lambda _: served)})

    monkeypatch.setattr(start_speed, "Client", connect)
    monkeypatch.setattr(start_speed.time, "perf_counter", lambda: served.now)
    return served


def test_each_size_is_new_when_it_is_asked(served: Served) -> None:
    ratios = first_requests("http://nowhere", "m", 3)
    assert served.asked[:3] == [1, 2, 3]
    assert len(served.asked) == 18
    assert ratios == pytest.approx({1: 3.0, 2: 3.0, 3: 3.0})


def test_requests_are_as_the_model_takes_them() -> None:
    feeds = feeds_of(INPUTS, 4)
    assert {name: (array.shape, array.dtype) for name, array in feeds.items()} == {
        "x": ((4, 3, 1), np.dtype(np.float16)),
        "n": ((4,), np.dtype(np.int64)),
    }


def test_one_slow_request_among_the_later_ones_says_nothing() -> None:
    assert ratio_to_later(2.0, [1.0, 1.0, 90.0]) == 2.0
