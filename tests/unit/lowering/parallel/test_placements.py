"""What ran in the parts of a split graph, added up."""

from __future__ import annotations

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.parallel.building import join_placements


def test_parts_are_added_up() -> None:
    small = Placement(nodes={"CPU": 9}, precision="integer", products={Precision.INT8: 1}, elsewhere=("a",))
    large = Placement(nodes={"CPU": 2, "GPU": 1}, precision=Precision.FP32, products={Precision.FP32: 2})
    assert join_placements([small, large, large]) == Placement(
        nodes={"CPU": 13, "GPU": 2},
        precision=Precision.FP32,
        products={Precision.INT8: 1, Precision.FP32: 4},
        elsewhere=("a",),
    )
