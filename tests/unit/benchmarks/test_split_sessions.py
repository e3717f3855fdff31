"""What sums of shards take, measured from outside of the sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from split_sessions import Stopwatch, time_sums

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.pipeline import PipelineSession, Stage
from graphkiln_backend.lowering.parallel.shards import Segment, ShardedSession
from graphkiln_backend.lowering.parallel.worker import Worker
from graphkiln_backend.system.closing import Closeable

SIGNATURE = Signature(inputs=(), outputs=(TensorSpec(name="sum", dtype=DType.FP32, shape=(2,)),))


class Ready(Closeable):
    """A shard whose partial sum is there."""

    signature = SIGNATURE

    def run(self, _: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        return dict.fromkeys(outputs or (), np.ones(2, np.float32))

    def placement(self, _: Mapping[str, AnyArray]) -> Placement:
        return Placement(nodes={}, precision=Precision.FP32)

    def close(self) -> None:
        pass


def staged(session: ShardedSession | Ready) -> PipelineSession:
    outputs = ("sum",)
    return PipelineSession([Stage(session=session, worker=Worker(), inputs=(), outputs=outputs)], SIGNATURE, 1)


def test_sums_are_timed_and_stay_what_they_are() -> None:
    segment = Segment(sessions=(Ready(), Ready()), inputs=(), outputs=("p",), reduced={"p": "sum"})
    watch = Stopwatch()
    with staged(ShardedSession([segment], [Worker(), Worker()], SIGNATURE)) as session:
        assert time_sums(session, watch)
        assert watch.seconds == 0
        np.testing.assert_array_equal(session.run({})["sum"], [2, 2])
        first = watch.seconds
        assert first > 0
        session.run({})
        assert watch.seconds > first


def test_stages_without_shards_have_none() -> None:
    watch = Stopwatch()
    with staged(Ready()) as session:
        assert not time_sums(session, watch)
        session.run({})
    assert watch.seconds == 0
