"""Into how many parts a batch is cut: as many as make it faster, by a model of costs that a simulation agrees with."""

from __future__ import annotations

import math

import pytest

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.lowering.parallel.split import Cutting, FindStages, StageCost, cut_batch, usual_counts


def stage(seconds: float) -> StageCost:
    return StageCost(begin=0, end=1, seconds=seconds, weight_bytes=0, activation_bytes=0, handed_bytes=0, flops=0)


def simulated(times: list[float], count: int) -> float:
    """When the last micro-batch leaves the last stage: each waits for the stage and for the one before it."""
    free = [0.0] * len(times)
    done = 0.0
    for _ in range(count):
        done = 0.0
        for number, seconds in enumerate(times):
            done = free[number] = max(done, free[number]) + seconds
    return done


def machine(fixed_s: float, row_s: float, stages: int = 2) -> FindStages:
    """Stages that read weights for a while, and then compute row by row."""
    return lambda rows: (stage(fixed_s + rows * row_s),) * stages


@pytest.mark.parametrize("times", [[1.0], [1.0, 1.0], [1.0, 3.0, 2.0], [5.0, 0.5]])
@pytest.mark.parametrize("count", [1, 2, 7])
def test_the_time_of_a_batch(times: list[float], count: int) -> None:
    cutting = Cutting(count=count, rows=1, stages=tuple(map(stage, times)))
    assert cutting.seconds == pytest.approx(simulated(times, count))


@pytest.mark.parametrize(
    ("fixed_s", "row_s", "count"),
    [
        (0.0, 1.0, 32),  # nothing is lost by cutting: all stages work nearly all of the time
        (1e-9, 1.0, 32),
        (1.0, 1.0, 4),  # of 8 rows: (4 + 1) * 9 = 45 s; 8 parts take (8 + 1) * 5 = 45 s, too, and are more
        (8.0, 1.0, 2),
        (1.0, 0.0, 1),  # rows cost nothing: all that cutting does is to read weights again
    ],
)
def test_weights_that_are_read_again_speak_for_fewer(fixed_s: float, row_s: float, count: int) -> None:
    find = machine(fixed_s, row_s)
    cutting = cut_batch(find, 32, usual_counts(32))
    times = {number: simulated([fixed_s + math.ceil(32 / number) * row_s] * 2, number) for number in usual_counts(32)}
    assert cutting.count == count
    assert cutting.seconds == pytest.approx(min(times.values()))
    assert cutting.rows == math.ceil(32 / count)


def test_what_does_not_fit_is_not_considered() -> None:
    """Activations of larger parts need more memory."""

    def find(rows: int) -> tuple[StageCost, ...]:
        if rows > 8:
            raise LoweringError(f"{rows} rows do not fit", attempts=())
        return machine(8.0, 1.0)(rows)

    assert cut_batch(find, 32, usual_counts(32)).rows == 8
    with pytest.raises(LoweringError, match="16 rows do not fit"):
        cut_batch(find, 32, (1, 2))


class TestSeveralBatches:
    """Of instances that share the stages: while one batch ends, another begins."""

    @pytest.mark.parametrize("times", [[1.0, 1.0], [1.0, 3.0, 2.0]])
    @pytest.mark.parametrize("count", [1, 4])
    @pytest.mark.parametrize("turns", [2, 3])
    def test_the_time_of_a_batch_among_others(self, times: list[float], count: int, turns: int) -> None:
        """A stage is never idle, or all that are under way pass it one by one; beside a simulation of many of them."""
        cutting = Cutting(count=count, rows=1, stages=tuple(map(stage, times)), turns=turns)
        batches = 300
        assert cutting.seconds <= many(times, count, turns, batches) / batches * 1.02
        assert cutting.seconds >= many(times, count, len(times) * turns, batches) / batches * 0.98

    def test_two_batches_in_two_stages_need_not_be_cut(self) -> None:
        alone, shared = (cut_batch(machine(0.0, 1.0), 16, usual_counts(16), turns) for turns in (1, 2))
        assert (alone.count, shared.count) == (16, 1)
        assert (alone.seconds, shared.seconds) == (17.0, 16.0)


def many(times: list[float], count: int, turns: int, batches: int) -> float:
    """When the last of many batches is done, as many of which as `turns` are under way at once."""
    free, done = [0.0] * len(times), list[float]()
    for batch in range(batches):
        ready = done[batch - turns] if batch >= turns else 0.0
        for _ in range(count):
            at = ready
            for number, seconds in enumerate(times):
                at = free[number] = max(at, free[number]) + seconds
        done.append(at)
    return done[-1]
