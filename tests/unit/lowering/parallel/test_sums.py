"""Partial sums of shards, added in the memory of the process."""

from __future__ import annotations

import numpy as np

from graphkiln_backend.lowering.parallel.building import HostSums, add_up


def test_sums_are_new_arrays_in_the_order_of_the_shards() -> None:
    large, small = np.array([1e8], np.float32), np.array([1.0], np.float32)
    assert add_up([large, -large, small]) == [1]
    assert add_up([small, large, -large]) == [0], "another order has other roundings"
    assert (large, small) == (np.float32(1e8), np.float32(1))


def test_every_shard_reads_the_same_sum() -> None:
    sums = HostSums()
    totals = sums.add([np.ones(2, np.float32)] * 3)
    assert len(totals) == 3
    assert all(total is totals[0] for total in totals)
    np.testing.assert_array_equal(sums.fetch(totals[0]), [3, 3])
