"""The first request of each batch size beside later ones: a client that stands in for a server counts and waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import start_speed
from start_speed import feeds_of, first_requests

from graphkiln_backend.graph.errors import ServerError

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
