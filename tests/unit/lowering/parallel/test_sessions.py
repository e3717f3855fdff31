"""Sessions of stages and shards: order of rows, errors, sums, and their threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import ContextVar

import numpy as np
import pytest
from fake_session import FakeSession, spec

from graphkiln_backend.graph.device import WAITING
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.parallel.building import (
    PipelineSession,
    Segment,
    ShardedSession,
    Stage,
    Worker,
    results_of,
)

Compute = Callable[[dict[str, AnyArray]], dict[str, AnyArray]]


SIGNATURE = Signature(
    inputs=(spec("x", "batch", 2), spec("z", "batch", 2)), outputs=(spec("y", "batch", 2), spec("early", "batch", 2))
)


@pytest.fixture
def stages() -> list[FakeSession]:
    """`early = x + 1`, `h = early * 2`, `y = h + z`: `z` and `early` pass stages that do not read them."""
    return [
        FakeSession(SIGNATURE, lambda feeds: {"early": feeds["x"] + 1}),
        FakeSession(SIGNATURE, lambda feeds: {"h": feeds["early"] * 2}),
        FakeSession(SIGNATURE, lambda feeds: {"y": feeds["h"] + feeds["z"]}),
    ]


def pipeline(stages: list[FakeSession], micro_batches: int) -> PipelineSession:
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
def test_rows_keep_their_order(stages: list[FakeSession], micro_batches: int, rows: int, parts: list[int]) -> None:
    with pipeline(stages, micro_batches) as session:
        given = feeds(rows)
        found = session.run(given)
        np.testing.assert_array_equal(found["y"], (given["x"] + 1) * 2 + given["z"])
        np.testing.assert_array_equal(found["early"], given["x"] + 1)
        assert list(found) == ["y", "early"]
        assert list(session.run(given, ["early"])) == ["early"]
    assert [stage.rows[: len(parts)] for stage in stages] == [parts] * 3
    assert len({thread for stage in stages for thread in stage.threads}) == 3, "one thread per stage"


def test_stages_run_in_parallel(stages: list[FakeSession]) -> None:
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


def test_failed_stage_fails_its_batch_only(stages: list[FakeSession]) -> None:
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


def test_outputs_of_varying_size_cannot_be_joined(stages: list[FakeSession]) -> None:
    stages[2].compute = lambda feeds: {"y": np.zeros((1, int(feeds["z"][0, 0])))}
    with pipeline(stages, 2) as session:
        with pytest.raises(ExecutionError, match=r"'y' has the shapes \[1, 0\], \[1, 200\].*micro_batches=1"):
            session.run(feeds(2))
        assert session.run({name: array[1:] for name, array in feeds(2).items()})["y"].shape == (1, 200)


def test_placement_joins_all_stages(stages: list[FakeSession]) -> None:
    with pipeline(stages, 2) as session:
        placement = session.placement(feeds(4))
    assert (placement.nodes, placement.products) == ({"fake": 4}, {Precision.FP32: 3})
    assert [stage.rows for stage in stages] == [[4]] * 3


def test_close_ends_threads_and_sessions(stages: list[FakeSession]) -> None:
    session = pipeline(stages, 2)
    session.run(feeds(2))
    session.close()
    assert [stage.closed for stage in stages] == [1, 1, 1]
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        session.run(feeds(2))


AHEAD = WAITING + 2
# begun by a stage and not ended by the next one: one in each of the two, and those that wait


def test_number_of_waiting_micro_batches_is_bounded(stages: list[FakeSession]) -> None:
    overtaken, begun = threading.Event(), threading.Semaphore(0)
    first, second = stages[0].compute, stages[1].compute

    def note(tensors: dict[str, AnyArray]) -> dict[str, AnyArray]:
        begun.release()
        if len(stages[0].rows) > AHEAD:
            overtaken.set()
        return first(tensors)

    def hold(tensors: dict[str, AnyArray]) -> dict[str, AnyArray]:
        if len(stages[1].rows) == 1:
            for _ in range(AHEAD):
                assert begun.acquire(timeout=30), "as many are begun as may be"
            assert not overtaken.wait(0.1)
        assert len(stages[0].rows) < len(stages[1].rows) + AHEAD
        return second(tensors)

    stages[0].compute, stages[1].compute = note, hold
    with pipeline(stages, 9) as session:
        found = session.run(feeds(9))
    np.testing.assert_array_equal(found["y"], (feeds(9)["x"] + 1) * 2 + feeds(9)["z"])
    assert overtaken.is_set(), "the others came later"


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_failed_stage_releases_its_slots(stages: list[FakeSession], broken: int) -> None:
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


SHARD_SIGNATURE = Signature(inputs=(spec("x", "batch"),), outputs=(spec("y", "batch"), spec("total", "batch")))


def sharded(
    *factors: float, error: Exception | None = None, broken: int = 1
) -> tuple[ShardedSession, list[FakeSession]]:
    """`total = x * (a + b)`, then `y = total * 10` in every shard."""

    def multiply(factor: float, output: str, failure: Exception | None = None) -> FakeSession:
        def compute(feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
            if failure:
                raise failure
            (array,) = feeds.values()
            return {output: array * np.float32(factor)}

        return FakeSession(SHARD_SIGNATURE, compute)

    first = tuple(multiply(factor, "p") for factor in factors)
    second = tuple(multiply(10, "y", error if number == broken else None) for number in range(len(factors)))
    segments = [
        Segment(sessions=first, inputs=("x",), outputs=("p",), reduced={"p": "total"}),
        Segment(sessions=second, inputs=("total",), outputs=("y",)),
    ]
    return ShardedSession(segments, [Worker() for _ in factors], SHARD_SIGNATURE), [*first, *second]


def test_partial_sums_are_added() -> None:
    x = np.array([1, 2], np.float32)
    with sharded(3, 4, 5)[0] as session:
        found = session.run({"x": x})
        assert list(found) == ["y", "total"]
        np.testing.assert_array_equal(found["total"], x * 12)
        np.testing.assert_array_equal(found["y"], x * 120)
        assert list(session.run({"x": x}, ["y"])) == ["y"]


def test_placement_joins_all_shards() -> None:
    with sharded(1, 2)[0] as session:
        placement = session.placement({"x": np.ones(2, np.float32)})
    assert (placement.nodes, placement.products) == ({"fake": 4}, {Precision.FP32: 4})


@pytest.mark.parametrize("broken", [0, 1, 2])
def test_failed_shard_fails_the_request(broken: int) -> None:
    session, sessions = sharded(1, 2, 3, error=ExecutionError("the device is gone"), broken=broken)
    with session, pytest.raises(ExecutionError, match="the device is gone"):
        session.run({"x": np.ones(2, np.float32)})
    assert [each.closed for each in sessions] == [1] * 6
    assert [len(each.feeds) for each in sessions] == [1] * 6, "all were computed, and none runs any more"


MARK: ContextVar[str] = ContextVar("MARK", default="none")


def test_worker_and_its_threads_stay_on_their_cores() -> None:
    core = min(os.sched_getaffinity(0))
    inherited: list[set[int]] = []

    def start_another() -> set[int]:
        thread = threading.Thread(target=lambda: inherited.append(os.sched_getaffinity(0)))
        thread.start()
        thread.join()
        return os.sched_getaffinity(0)

    before = os.sched_getaffinity(0)
    with Worker([core]) as worker:
        assert worker.submit(start_another).result() == {core}
    assert inherited == [{core}]
    assert os.sched_getaffinity(0) == before


def test_worker_runs_calls_in_order_in_the_callers_context() -> None:
    order: list[int] = []
    MARK.set("mine")
    with Worker() as worker:
        futures = [worker.submit(order.append, number) for number in range(50)]
        assert worker.submit(MARK.get).result() == "mine"
        results_of(futures)
    assert order == list(range(50))


def test_results_of_waits_for_all_calls_after_an_error() -> None:
    first, second = Future[int](), Future[int]()
    returned = threading.Event()
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            results_of([first, second])
        except ValueError as error:
            errors.append(error)
        returned.set()

    thread = threading.Thread(target=wait)
    thread.start()
    first.set_exception(ValueError("broken"))
    assert not returned.wait(0.05), "the other one still reads the caller's arrays"
    second.set_result(2)
    assert returned.wait(10)
    thread.join()
    assert [str(error) for error in errors] == ["broken"]
