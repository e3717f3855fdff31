"""What a shard holds of a tensor."""

from __future__ import annotations

import numpy as np
import onnx_ir
import pytest

from graphkiln_backend.passes.sharding_rules import CannotShard, Cut, check_divides, dims


def test_a_shard_holds_neighbors_of_each_block() -> None:
    assert list(Cut(0, 6).indices(6, 2, 1)) == [3, 4, 5]
    assert list(Cut(1, 4).indices(12, 2, 0)) == [0, 1, 4, 5, 8, 9]


@pytest.mark.parametrize("cut", [Cut(1, 24), Cut(0, 8), Cut(2, 4)])
def test_the_shards_hold_everything_once(cut: Cut) -> None:
    held = np.concatenate([cut.indices(24, 4, shard) for shard in range(4)])
    assert sorted(held) == list(range(24))


def test_what_does_not_divide() -> None:
    value = onnx_ir.Value(name="w", shape=onnx_ir.Shape([6, "n"]))
    check_divides(value, Cut(0, 2), 2)
    check_divides(value, Cut(1, 4), 4)
    for cut in (Cut(0, 2), Cut(0, 4), Cut(1, 6)):
        with pytest.raises(CannotShard, match="'w' has"):
            check_divides(value, cut, 4)
    with pytest.raises(CannotShard, match="the shape of 'v' is not known"):
        dims(onnx_ir.Value(name="v"))
