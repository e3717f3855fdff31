"""Requests to a server that is not there."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any, Self

import numpy as np
import pytest

import graphkiln_client
from graphkiln.story.digits import Digits
from graphkiln.story.workloads.base import load_batch
from graphkiln.story.workloads.served import ServedWorkload
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess


class FakeClient:
    """A client of one model: the score of an image is its mean, and the answer takes the longer the darker it is."""

    opened: list[FakeClient]

    def __init__(self, url: str, timeout_s: float) -> None:
        self.url, self.timeout_s = url, timeout_s
        self.preprocess = Preprocess(resize=2, crop=(2, 2))
        self.classified: list[tuple[bytes, int]] = []
        self.threads: set[int] = set()
        self.closed = False
        self.opened.append(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed = True

    def model(self, name: str) -> Self:
        assert name == "compiled"
        return self

    def infer(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        self.threads.add(threading.get_ident())
        mean = float(feeds["INPUT_0"].mean())
        time.sleep(0.02 * (1 - mean))
        return {"OUTPUT_0": np.array([[mean, -mean]]), "INDEX_0": np.array([[0, 1]])}

    def classify(self, jpeg: bytes, top_k: int) -> str:
        self.classified.append((jpeg, top_k))
        return "seven"


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[FakeClient]:
    """The clients that were opened."""
    clients: list[FakeClient] = []

    class Client(FakeClient):
        opened = clients

    monkeypatch.setattr(graphkiln_client, "Client", Client)
    return clients


def workload(**fields: Any) -> ServedWorkload:
    usual = {"url": "grpc://h:1", "model": "compiled", "callers": 3, "top_k": 0, "gradient": False}
    return ServedWorkload(**{**usual, **fields})


def test_predictions_are_in_the_order_of_the_images(opened: list[FakeClient], held_out: Digits) -> None:
    """Although several are under way at once, and answered in another order."""
    with workload().open() as predictor:
        found = predictor.predict(held_out.jpegs)
    means = [load_batch([jpeg], Preprocess(resize=2, crop=(2, 2))).mean() for jpeg in held_out.jpegs]
    np.testing.assert_allclose(found.scores[:, 0], means, rtol=1e-6)
    assert found.indices is not None
    assert len(opened[0].threads) > 1


def test_the_client_is_patient_and_closed(opened: list[FakeClient]) -> None:
    with workload().open() as predictor:
        assert predictor.callers == 3
        assert not opened[0].closed
    assert (opened[0].url, opened[0].timeout_s, opened[0].closed) == ("grpc://h:1", 600, True)


@pytest.mark.parametrize(
    ("top_k", "gradient", "labeled"), [(0, False, False), (5, False, True), (5, True, False), (0, True, False)]
)
def test_images_come_back_with_labels_where_the_graph_ranks(
    opened: list[FakeClient], held_out: Digits, top_k: int, gradient: bool, labeled: bool
) -> None:
    """A gradient beside the ranking is a tensor: `classify` would leave it out, and measure less work."""
    with workload(top_k=top_k, gradient=gradient).open() as predictor:
        found = predictor.run_one(held_out.jpegs[0])
    assert (found == "seven") is labeled
    assert opened[0].classified == ([(held_out.jpegs[0], 5)] if labeled else [])


def test_the_server_says_how_an_image_becomes_the_input(opened: list[FakeClient], held_out: Digits) -> None:
    with workload().open() as predictor:
        opened[0].preprocess = Preprocess(resize=2, crop=(2, 2), mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
        shifted = predictor.predict(held_out.jpegs[:1]).scores[0, 0]
    plain = load_batch(held_out.jpegs[:1], Preprocess(resize=2, crop=(2, 2))).mean()
    assert shifted == pytest.approx(2 * plain - 1, rel=1e-5)
