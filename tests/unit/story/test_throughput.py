"""Throughput of a function: what counts, and what does not."""

from __future__ import annotations

import time

import pytest
from stories import JPEGS

from graphkiln.story.throughput import _rate, measure_throughput
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


def test_the_images_of_one_batch_are_no_rate() -> None:
    """Of six callers whose batches of four take 1.2 s, two more are done within 3 s, both at once."""
    done = [1.2 * (number // 4 + 1) + number / 1e4 for number in range(20)]
    assert _rate(0.0, done, callers=6, deadline=3.0) == pytest.approx(20 / 6.0, rel=1e-3)
    assert _rate(0.0, done, callers=4, deadline=5.0) == pytest.approx(12 / 3.6, rel=0.01)


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
