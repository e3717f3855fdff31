"""First requests of each batch size, by a client without a server, and the rows of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import start_speed
from start_speed import BARE, Start, feeds_of, first_requests, rows_of

from graphkiln_backend.graph.errors import ServerError

INPUTS = [{"name": "x", "datatype": "FP16", "shape": [-1, 3, -1]}, {"name": "n", "datatype": "INT64", "shape": [-1]}]


class Served:
    """A model whose first request of a size takes three times as long as later ones."""

    def __init__(self) -> None:
        self.now = 0.0
        self.sizes: list[int] = []
        self.metadata = {"inputs": INPUTS}

    def infer(self, feeds: Mapping[str, Any]) -> None:
        raise ServerError(f"{len(feeds['x'])} rows are too many")

    def repeatable(self, feeds: Mapping[str, Any]) -> Callable[[], None]:
        size = len(feeds["x"])

        def send() -> None:
            self.now += 0.01 * size * (1 if size in self.sizes else 3)
            self.sizes.append(size)

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


def test_first_requests_of_all_sizes_come_before_later_ones(served: Served) -> None:
    ratios = first_requests("http://nowhere", "m", 3)
    assert served.sizes[:3] == [1, 2, 3]
    assert len(served.sizes) == 18
    assert ratios == pytest.approx({1: 3.0, 2: 3.0, 3: 3.0})


def test_requests_have_the_shapes_and_dtypes_of_the_model() -> None:
    feeds = feeds_of(INPUTS, 4)
    assert {name: (array.shape, array.dtype) for name, array in feeds.items()} == {
        "x": ((4, 3, 1), np.dtype(np.float16)),
        "n": ((4,), np.dtype(np.int64)),
    }


def test_rows_are_medians_of_phases_with_ratios_to_the_peer() -> None:
    first = {("digits", 1): 2.0}
    cold = [
        Start(seconds={"ready": ready, "ready and proven": ready, "load": 1.0}, peak_mb=10.4, first=first)
        for ready in (2.0, 3.0, 9.0)
    ]
    warm = [Start(seconds={"ready": 1.5, "ready and proven": 1.8}, peak_mb=8.0, first=first)]
    bare = [Start(seconds={"ready": 1.5}, peak_mb=4.0)]
    rows = rows_of(["digits"], {"digits, cold": cold, "digits, warm": warm, f"digits, {BARE}": bare})
    assert [tuple(row.values()) for row in rows] == [
        ("load s", 1.0, 0.0),
        ("ready s", 3.0, 1.5),
        ("ready and proven s", 3.0, 1.8),
        ("peak MB", 10, 8),
        ("worst first request of a batch size, ratio to later ones", 2.0, 2.0),
        ("bare sessions s", 1.5, 1.5),
        ("ratio", 2.0, 1.0),
        ("ratio, ready and proven", 2.0, 1.2),
        ("bare sessions, peak MB", 4, 4),
    ]
