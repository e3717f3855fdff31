"""What waits and what computes, from what `graphkiln bench` says."""

from __future__ import annotations

import pytest
from queue_speed import read_queue, rows_of

CLIENT = {"per_second": 10.0, "latency_ms": {"p50": 1.0, "p99": 9.0}}


def told(rate: float, queue_us: float, infer_us: float, batch: float, p99_ms: float) -> dict[str, object]:
    client = {"per_second": rate, "latency_ms": {"p50": 1.0, "p99": p99_ms}, "errors": {}, "unsent": 0}
    return {"client": client, "server_us": {"queue": queue_us, "infer": infer_us}, "batch": batch}


def test_a_hundred_requests_a_second_that_wait_20_ms_are_two_that_wait() -> None:
    found = read_queue(told(100, 20_000, 30_000, 4, 9), instances=1)
    assert found.waiting == pytest.approx(2)
    assert found.busy == pytest.approx(0.75)  # 25 batches of 30 ms each second
    assert read_queue(told(100, 20_000, 30_000, 4, 9), instances=2).busy == pytest.approx(0.375)


def test_nothing_that_was_computed_keeps_nobody_busy() -> None:
    assert read_queue(told(0, 0, 0, 0, 0), instances=1).busy == 0


def test_requests_that_failed_or_were_not_sent_are_counted() -> None:
    good, bad = told(10, 0, 0, 1, 9), told(10, 0, 0, 1, 9)
    bad["client"] = {**CLIENT, "errors": {"HTTP 503": 2, "Timeout": 1}, "unsent": 4}
    (row,) = rows_of("m", {1.0: [read_queue(each, 1) for each in (good, bad)]})
    assert row["failed"] == 7


def test_rows_are_medians_and_ratios_to_the_smallest_share() -> None:
    runs = {share: [read_queue(told(10, 0, 0, 1, p99), 1) for p99 in (p99s)] for share, p99s in RUNS.items()}
    half, full = rows_of("m", runs)
    assert (half["set-up"], half["p99 ms"], half["ratio"]) == ("50% of the highest rate", 4.0, 1.0)
    assert (full["set-up"], full["p99 ms"], full["ratio"]) == ("100% of the highest rate", 10.0, 2.5)


RUNS = {1.0: (9.0, 10.0, 400.0), 0.5: (4.0, 3.0, 50.0)}
