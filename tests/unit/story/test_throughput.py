"""Throughput of a function: what counts, and what does not."""

from __future__ import annotations

import time

import pytest
from stories import JPEGS

from graphkiln.story.throughput import measure_throughput
from graphkiln_backend.graph.errors import MeasurementError


def test_one_caller_is_busy_all_the_time() -> None:
    found = measure_throughput(lambda _: time.sleep(0.01), 1, JPEGS, 0.1)
    assert found.per_second == pytest.approx(found.images / found.seconds)
    assert len(found.latencies_ms) == found.images
    assert min(found.latencies_ms) >= 10


def test_a_slow_image_is_answered_although_the_time_is_over() -> None:
    assert measure_throughput(lambda _: time.sleep(0.05), 1, JPEGS, 0.001).images == 1


def test_batches_count_from_answer_to_answer() -> None:
    """A stand-in for a server that answers all who wait at every tick; filling and emptying must not count."""
    begun = time.perf_counter()
    waiting = iter([0.4] * 4)  # the first batch is late

    def ask(_: bytes) -> None:
        time.sleep(next(waiting, 0))
        time.sleep(0.05 - (time.perf_counter() - begun) % 0.05)

    found = measure_throughput(ask, 4, JPEGS, 0.92)
    assert found.per_second == pytest.approx(80, rel=0.3)


def test_images_are_taken_in_turn() -> None:
    taken: list[bytes] = []

    def ask(jpeg: bytes) -> None:
        taken.append(jpeg)
        time.sleep(0.002)

    measure_throughput(ask, 1, JPEGS, 0.5)
    assert taken[:4] == [*JPEGS, JPEGS[0]]


def test_an_error_ends_it() -> None:
    def ask(_: bytes) -> None:
        raise MeasurementError("no more")

    with pytest.raises(MeasurementError, match="no more"):
        measure_throughput(ask, 3, JPEGS, 60)
