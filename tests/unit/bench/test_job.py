"""What a process of the load generator is told."""

from __future__ import annotations

import io

import numpy as np
import pytest

from graphkiln.bench.job import Job, Load, Target, hear, tell


def test_shares_of_a_closed_loop_are_all_callers() -> None:
    shares = [Load(callers=7, seconds=1, warmup_s=0).share(number, 3) for number in range(3)]
    assert [share.callers for share in shares] == [3, 2, 2]
    assert {share.arrivals for share in shares} == {None}


def test_shares_of_an_open_loop_are_all_arrivals() -> None:
    load = Load(callers=256, seconds=1, warmup_s=0, arrivals=np.arange(5.0))
    parts = [load.share(number, 2).arrivals for number in range(2)]
    assert [part.tolist() for part in parts if part is not None] == [[0, 2, 4], [1, 3]]


def test_a_job_passes_through_a_pipe() -> None:
    target = Target(client={"url": "http://localhost:8000"}, model="m")
    job = Job(target=target, load=Load(callers=1, seconds=1, warmup_s=0), samples=[{"X": np.array([b"text"], object)}])
    pipe = io.BytesIO()
    tell(pipe, job)
    tell(pipe, 12.5)
    pipe.seek(0)
    found = hear(pipe)
    assert (found.target, found.load) == (target, job.load)
    assert found.samples[0]["X"].tolist() == [b"text"]
    assert hear(pipe) == 12.5
    with pytest.raises(EOFError):
        hear(pipe)
