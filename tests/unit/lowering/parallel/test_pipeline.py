"""Micro-batches through stages: nothing is lost, swapped or left over, whatever fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import pytest

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.device import WAITING
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.building import PipelineSession, Stage, Worker
from graphkiln_backend.system.closing import Closeable

Compute = Callable[[dict[str, AnyArray]], dict[str, AnyArray]]


class Computed(Closeable):
    """A stage that computes what a test says."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.rows: list[int] = []
        self.threads: set[int] = set()
        self.closed = 0
        self.signature = Signature(inputs=(), outputs=())

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        self.rows.append(len(next(iter(feeds.values()))))
        self.threads.add(threading.get_ident())
        found = self.compute(dict(feeds))
        assert outputs is not None
        return {name: found[name] for name in outputs}

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        return Placement(
            nodes={"fake": len(feeds)}, precision=Precision.FP32, products={Precision.FP32: 1}, elsewhere=("n",)
        )

    def close(self) -> None:
        self.closed += 1


def spec(name: str) -> TensorSpec:
    return TensorSpec(name=name, dtype=DType.FP32, shape=("batch", 2))


SIGNATURE = Signature(inputs=(spec("x"), spec("z")), outputs=(spec("y"), spec("early")))


@pytest.fixture
def stages() -> list[Computed]:
    """`early = x + 1`, `h = early * 2`, `y = h + z`: `z` and `early` pass stages that do not read them."""
    return [
        Computed(lambda feeds: {"early": feeds["x"] + 1}),
        Computed(lambda feeds: {"h": feeds["early"] * 2}),
        Computed(lambda feeds: {"y": feeds["h"] + feeds["z"]}),
    ]


def pipeline(stages: list[Computed], micro_batches: int) -> PipelineSession:
    names = ((("x",), ("early",)), (("early",), ("h",)), (("h", "z"), ("y",)))
    return PipelineSession(
        [
            Stage(session=stage, worker=Worker(), inputs=inputs, outputs=outputs)
            for stage, (inputs, outputs) in zip(stages, names, strict=True)
        ],
        SIGNATURE,
        micro_batches,
    )


def feeds(rows: int) -> dict[str, AnyArray]:
    x = np.arange(rows * 2, dtype=np.float32).reshape(rows, 2)
    return {"x": x, "z": x * 100}


@pytest.mark.parametrize(
    ("micro_batches", "rows", "parts"),
    [(1, 7, [7]), (2, 7, [3, 4]), (4, 7, [1, 2, 2, 2]), (9, 3, [1, 1, 1]), (4, 0, [0]), (4, 1, [1])],
)
def test_every_row_comes_out_in_its_place(
    stages: list[Computed], micro_batches: int, rows: int, parts: list[int]
) -> None:
    with pipeline(stages, micro_batches) as session:
        given = feeds(rows)
        found = session.run(given)
        np.testing.assert_array_equal(found["y"], (given["x"] + 1) * 2 + given["z"])
        np.testing.assert_array_equal(found["early"], given["x"] + 1)
        assert list(found) == ["y", "early"]
        assert list(session.run(given, ["early"])) == ["early"]
    assert [stage.rows[: len(parts)] for stage in stages] == [parts] * 3
    assert len({thread for stage in stages for thread in stage.threads}) == 3, "each stage has a thread of its own"


def test_stages_work_at_the_same_time(stages: list[Computed]) -> None:
    """The first stage computes the second micro-batch while the second stage computes the first."""
    meeting = threading.Barrier(2, timeout=30)

    def meet(number: int, compute: Compute) -> Compute:
        def run(tensors: dict[str, AnyArray]) -> dict[str, AnyArray]:
            if len(stages[number].rows) == 2 - number:
                meeting.wait()
            return compute(tensors)

        return run

    for number in (0, 1):
        stages[number].compute = meet(number, stages[number].compute)
    with pipeline(stages, 2) as session:
        found = session.run(feeds(2))
    np.testing.assert_array_equal(found["early"], feeds(2)["x"] + 1)


def test_a_stage_that_fails_fails_the_batch_and_the_next_one_is_computed(stages: list[Computed]) -> None:
    right = stages[1].compute

    def fail(tensors: dict[str, AnyArray]) -> dict[str, AnyArray]:
        if len(stages[1].rows) == 2:
            raise ExecutionError("the device is gone")
        return right(tensors)

    stages[1].compute = fail
    with pipeline(stages, 4) as session:
        with pytest.raises(ExecutionError, match="the device is gone"):
            session.run(feeds(4))
        assert len(stages[2].rows) == 3, "nothing runs any more, and the others were computed"
        found = session.run(feeds(4))
        np.testing.assert_array_equal(found["y"], (feeds(4)["x"] + 1) * 2 + feeds(4)["z"])


def test_outputs_whose_size_follows_from_values_cannot_be_joined(stages: list[Computed]) -> None:
    stages[2].compute = lambda feeds: {"y": np.zeros((1, int(feeds["z"][0, 0])))}
    with pipeline(stages, 2) as session:
        with pytest.raises(ExecutionError, match=r"'y' has the shapes \[1, 0\], \[1, 200\].*micro_batches=1"):
            session.run(feeds(2))
        assert session.run({name: array[1:] for name, array in feeds(2).items()})["y"].shape == (1, 200)


def test_what_ran_is_that_of_all_stages(stages: list[Computed]) -> None:
    with pipeline(stages, 2) as session:
        placement = session.placement(feeds(4))
    assert (placement.nodes, placement.products) == ({"fake": 4}, {Precision.FP32: 3})
    assert placement.elsewhere == ("n", "n", "n")
    assert [stage.rows for stage in stages] == [[4]] * 3


def test_closing_ends_threads_and_sessions(stages: list[Computed]) -> None:
    session = pipeline(stages, 2)
    session.run(feeds(2))
    session.close()
    assert [stage.closed for stage in stages] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        session.run(feeds(2))


AHEAD = WAITING + 2
"""Micro-batches that a stage has begun at most and the next one has not ended: one in each of the two, and those that
wait between them."""


def test_a_stage_does_not_run_ahead_without_bound(stages: list[Computed]) -> None:
    """What waits takes memory of the stage that computed it, as the plan counts it."""
    overtaken, begun = threading.Event(), threading.Semaphore(0)
    first, second = stages[0].compute, stages[1].compute

    def note(tensors: dict[str, AnyArray]) -> dict[str, AnyArray]:
        begun.release()
        if len(stages[0].rows) > AHEAD:
            overtaken.set()
        return first(tensors)

    def stand_still(tensors: dict[str, AnyArray]) -> dict[str, AnyArray]:
        if len(stages[1].rows) == 1:
            for _ in range(AHEAD):
                assert begun.acquire(timeout=30), "as many are begun as may be"
            assert not overtaken.wait(0.1)
        assert len(stages[0].rows) < len(stages[1].rows) + AHEAD
        return second(tensors)

    stages[0].compute, stages[1].compute = note, stand_still
    with pipeline(stages, 9) as session:
        found = session.run(feeds(9))
    np.testing.assert_array_equal(found["y"], (feeds(9)["x"] + 1) * 2 + feeds(9)["z"])
    assert overtaken.is_set(), "the others came later"


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_a_stage_that_fails_leaves_as_much_room_as_before(stages: list[Computed], broken: int) -> None:
    right = stages[broken].compute

    def fail(_: dict[str, AnyArray]) -> dict[str, AnyArray]:
        raise ExecutionError("the device is gone")

    with pipeline(stages, 8) as session:
        stages[broken].compute = fail
        for _ in range(3):
            with pytest.raises(ExecutionError, match="the device is gone"):
                session.run(feeds(8))
        stages[broken].compute = right
        session.run(feeds(8))
        assert [room._value for room in session._room] == [AHEAD, AHEAD]
