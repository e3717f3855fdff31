"""Shards side by side, and the sums that join them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.building import Segment, ShardedSession, Worker
from graphkiln_backend.system.closing import Closeable


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.FP32, shape=("batch",))


SIGNATURE = Signature(inputs=(spec("x"),), outputs=(spec("y"), spec("total")))


class Scaled(Closeable):
    """Multiplies its only input into its only output."""

    def __init__(self, factor: float, error: Exception | None = None) -> None:
        self.factor = factor
        self.error = error
        self.closed = 0
        self.threads: list[int] = []
        self.signature = SIGNATURE

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        self.threads.append(threading.get_ident())
        if self.error:
            raise self.error
        ((_, array),) = feeds.items()
        assert outputs is not None
        (name,) = outputs
        return {name: array * np.float32(self.factor)}

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={"fake": len(feeds)}, precision=Precision.FP32, products={Precision.FP32: 1})

    def close(self) -> None:
        self.closed += 1


def sharded(*factors: float, error: Exception | None = None, broken: int = 1) -> tuple[ShardedSession, list[Scaled]]:
    """`total = x * (a + b)`, then `y = total * 10` in every shard."""
    first = tuple(Scaled(factor) for factor in factors)
    second = tuple(Scaled(10, error if number == broken else None) for number in range(len(factors)))
    segments = [
        Segment(sessions=first, inputs=("x",), outputs=("p",), reduced={"p": "total"}),
        Segment(sessions=second, inputs=("total",), outputs=("y",)),
    ]
    return ShardedSession(segments, [Worker() for _ in factors], SIGNATURE), [*first, *second]


def test_partial_sums_are_added() -> None:
    x = np.array([1, 2], np.float32)
    with sharded(3, 4, 5)[0] as session:
        found = session.run({"x": x})
        assert list(found) == ["y", "total"]
        np.testing.assert_array_equal(found["total"], x * 12)
        np.testing.assert_array_equal(found["y"], x * 120)
        assert list(session.run({"x": x}, ["y"])) == ["y"]


def test_what_ran_is_that_of_all_shards() -> None:
    with sharded(1, 2)[0] as session:
        placement = session.placement({"x": np.ones(2, np.float32)})
    assert (placement.nodes, placement.products) == ({"fake": 4}, {Precision.FP32: 4})


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_shard_that_fails_fails_the_request(broken: int) -> None:
    session, sessions = sharded(1, 2, 3, error=ExecutionError("the device is gone"), broken=broken)
    with session, pytest.raises(ExecutionError, match="the device is gone"):
        session.run({"x": np.ones(2, np.float32)})
    assert [each.closed for each in sessions] == [1] * 6
    assert [len(each.threads) for each in sessions] == [1] * 6, "all were computed, and none runs any more"
