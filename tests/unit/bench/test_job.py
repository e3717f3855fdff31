"""What a process of the load generator is told."""

from __future__ import annotations

import numpy as np

from graphkiln.bench.processes import Load


def test_shares_of_a_closed_loop_are_all_callers() -> None:
    shares = [Load(callers=7, seconds=1, warmup_s=0).share(number, 3) for number in range(3)]
    assert [share.callers for share in shares] == [3, 2, 2]
    assert {share.arrivals for share in shares} == {None}


def test_shares_of_an_open_loop_are_all_arrivals() -> None:
    load = Load(callers=256, seconds=1, warmup_s=0, arrivals=np.arange(5.0))
    parts = [load.share(number, 2).arrivals for number in range(2)]
    assert [part.tolist() for part in parts if part is not None] == [[0, 2, 4], [1, 3]]
