"""From options to loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln.bench.job import Load
from graphkiln.cli.bench_loads import Arrivals, plan_loads
from graphkiln_backend.graph.errors import InvalidInput


def test_numbers_of_callers() -> None:
    assert plan_loads() == [("1", Load(callers=1, seconds=10.0, warmup_s=1.0))]
    loads = plan_loads(concurrency="1,4, 4096", seconds=2.0, warmup_s=0.5)
    assert loads == [(str(number), Load(callers=number, seconds=2.0, warmup_s=0.5)) for number in (1, 4, 4096)]


@pytest.mark.parametrize("text", ["", "0", "1,0", "two", "1,,2", "-4", "1.5", "1;4", "1,4097"])
def test_other_numbers_are_mistakes(text: str) -> None:
    with pytest.raises(InvalidInput, match=f"--concurrency {text}: expected numbers of at least 1.*4096"):
        plan_loads(concurrency=text)


def one(**options: Any) -> tuple[str, Load, list[float]]:
    ((name, load),) = plan_loads(**options)
    assert load.arrivals is not None
    return name, load, load.arrivals.tolist()


def test_even_arrivals() -> None:
    name, load, arrivals = one(rate=4, arrivals=Arrivals.CONSTANT, seconds=1.0, warmup_s=0.5)
    assert name == "4/s even"
    assert load.callers == 256
    assert arrivals == [0, 0.25, 0.5, 0.75, 1, 1.25]


def test_random_arrivals_are_the_default() -> None:
    name, _, arrivals = one(rate=100.0)
    assert name == "100/s"
    assert (name, arrivals) != one(rate=100.0, arrivals=Arrivals.CONSTANT)[::2]
    assert arrivals == one(rate=100.0, arrivals=Arrivals.POISSON)[2]


def test_bursts() -> None:
    name, _, arrivals = one(rate=100.0, burst=5)
    assert name == "100/s by 5"
    assert {int(size) % 5 for size in np.unique(arrivals, return_counts=True)[1]} == {0}


def test_a_trace_lasts_as_long_as_it_was_recorded(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("10\n11\n12\n")
    name, load, arrivals = one(trace=tmp_path / "trace.csv", warmup_s=1.0)
    assert name == "trace"
    assert load.seconds == pytest.approx(2, abs=0.01)
    assert arrivals[-3:] == [1, 2, 3]
    assert load.seconds + load.warmup_s > arrivals[-1]
    assert arrivals[:-3] == pytest.approx([0, 0.667], abs=0.01)  # at its mean rate
    _, load, arrivals = one(trace=tmp_path / "trace.csv", warmup_s=0.0, seconds=1.5)
    assert (load.seconds, arrivals) == (1.5, [0, 1])  # or as long as requested


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"concurrency": "1", "rate": 5.0}, "--concurrency and --rate are different loads"),
        ({"trace": Path("x"), "rate": 5.0}, "--rate and --trace are different loads"),
        ({"burst": 5}, "add --rate"),
        ({"arrivals": Arrivals.CONSTANT, "concurrency": "2"}, "add --rate"),
        ({"rate": 5.0, "burst": 5, "arrivals": Arrivals.CONSTANT}, "--burst goes without --arrivals"),
    ],
)
def test_options_that_contradict_each_other(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        plan_loads(**options)
    assert words in f"{raised.value.message} {raised.value.hint}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rate": float("inf")}, "inf requests a second for 11 s"),
        ({"rate": 1e9, "seconds": 1.0}, "1e\\+09 requests a second for 2 s"),
        ({"rate": 1.0, "seconds": float("inf")}, "1 requests a second for inf s"),
        ({"seconds": float("inf")}, "a run of inf s"),
        ({"warmup_s": float("nan")}, "a run of nan s"),
        ({"rate": float("nan")}, "nan requests a second for 11 s"),
        ({"seconds": 1e10}, "a run of 1e\\+10 s"),
    ],
)
def test_runs_that_would_not_end(options: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        plan_loads(**options)


def test_a_trace_that_would_not_end(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("0\n1e300\n")
    with pytest.raises(InvalidInput, match="1e\\+300 s would not end"):
        plan_loads(trace=tmp_path / "trace.csv")


@pytest.mark.parametrize(
    "options",
    [{"rate": 0.01, "seconds": 1.0}, {"rate": 5.0, "burst": 10**6}, {"rate": 0.5, "warmup_s": 0.0, "seconds": 0.5}],
)
def test_a_rate_of_which_no_request_is_due_is_a_mistake(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="no request is due in"):
        plan_loads(**options)
