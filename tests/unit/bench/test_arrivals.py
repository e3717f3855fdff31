"""Arrival times of open loops."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphkiln.bench.arrivals import bursts, constant, poisson, read_trace
from graphkiln_backend.graph.errors import InvalidInput


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return tmp_path / "trace"


def test_poisson_is_reproducible() -> None:
    np.testing.assert_array_equal(poisson(100, 50), poisson(100, 50))
    assert poisson(100, 50, 1)[0] != poisson(100, 50)[0]
    gaps = np.diff(poisson(100, 50))
    assert gaps.mean() == pytest.approx(0.01, rel=0.1)
    assert gaps.std() == pytest.approx(0.01, rel=0.1), "an exponential distribution"


def test_constant_arrivals() -> None:
    moments = constant(4, 2)
    assert moments.tolist() == [0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75]
    assert constant(0.5, 1).tolist() == [0]


def test_bursts() -> None:
    moments = bursts(100, 100, 10)
    assert len(moments) == pytest.approx(10_000, rel=0.1)
    assert {size % 10 for size in np.unique(moments, return_counts=True)[1]} == {0}


@pytest.mark.parametrize("rate", [0.01, 1, 5000])
def test_arrivals_end_in_time(rate: float) -> None:
    for moments in (poisson(rate, 2), constant(rate, 2), bursts(rate, 2, 5)):
        assert (moments < 2).all()
        assert (np.diff(moments) >= 0).all()


@pytest.mark.parametrize(
    "text",
    [
        "100\n100.5\n102\n",
        "\ufeff100\n100.5\n102\n",
        "102\n\n100\n# a remark\n100.5",
        '"100",/a\r\n"100.5",/b\r\n"102",/c\r\n',
        "path,time\n/a,100\n/b,100.5\n/c,102\n",
        '"path", "time"\n"/a?x=1,7", "100"\n/b, 100.5\n"say ""1,2""",102\n',
        '{"time": 100}\n{"time": 100.5, "path": "/b"}\n{"time": "102"}\n',
        "2026-01-01T10:00:00Z\n2026-01-01 10:00:00.500+00:00\n2026-01-01T11:00:02+01:00\n",
    ],
)
def test_trace_starts_at_first_request(trace: Path, text: str) -> None:
    trace.write_text(text)
    assert read_trace(trace).tolist() == [0, 0.5, 2]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("time\n", "contains no arrival times"),
        ("1\n2\nthree\n", "line 3: 'three' has no arrival time"),
        ("path,time\n/a\n", "line 2: '/a'"),
        ('{"time": 1\n', "line 1"),
        ("1\nnan\n", "not finite"),
        ("\x00\xff\n\x00\n", "line 2"),
        ("1" + "0" * 200_000 + "\n" + "x" * 200_000, "line 2: 'xxx"),
    ],
)
def test_malformed_trace(trace: Path, text: str, words: str) -> None:
    trace.write_text(text)
    with pytest.raises(InvalidInput, match=words):
        read_trace(trace)


def test_missing_trace(trace: Path, tmp_path: Path) -> None:
    for path in (trace, tmp_path):
        with pytest.raises(InvalidInput, match="cannot be read"):
            read_trace(path)
