"""Warming up: the sizes that serving will form, with samples that make sense or made-up ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import ExecutionError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples, repeated
from graphkiln_backend.lowering.made_up import MadeUp
from graphkiln_backend.lowering.warmup import warm_up
from graphkiln_backend.repository.version import read_version

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


def test_every_size_is_run(digits: Path) -> None:
    version = read_version(digits / "1")
    sizes: list[int] = []
    with OnnxRuntimeEngine().build(version.graph_path, CONFIG) as session:
        run = session.run
        session.run = lambda feeds, outputs=None: (sizes.append(len(feeds["INPUT_0"])), run(feeds, outputs))[1]  # type: ignore[method-assign]
        assert warm_up(session, (1, 4, 7), version.golden) == ""
    assert sorted(set(sizes)) == [1, 4, 7]


def test_made_up_inputs_that_fail_are_reported_not_raised(digits: Path) -> None:
    class Failing:
        def __init__(self, session: Any) -> None:
            self.signature = session.signature

        def run(self, *_: Any) -> Any:
            raise ExecutionError("no such index")

    version = read_version(digits / "1")
    with OnnxRuntimeEngine().build(version.graph_path, CONFIG) as session:
        failing: Any = Failing(session)
        assert "no such index" in warm_up(failing, (1,), MadeUp())
        with pytest.raises(ExecutionError):
            warm_up(failing, (1,), version.golden)


def test_samples_are_repeated_in_order() -> None:
    np.testing.assert_array_equal(repeated({"x": np.arange(3)}, 7)["x"], [0, 1, 2, 0, 1, 2, 0])


@pytest.fixture
def session(add_engine: Any) -> Any:
    engine = add_engine("engine")
    return engine.build(Path("graph"), engine.config)


class TestOrder:
    def test_every_size_twice(self, session: Any, golden: GoldenSamples) -> None:
        assert warm_up(session, (1, 2, 8), golden) == ""
        assert session.batches == [1, 1, 2, 2, 8, 8]

    @pytest.mark.parametrize(("sizes", "runs"), [((1, 8), [1, 1, 8]), ((8, 1), [8, 1, 1]), ((1,), [1])])
    def test_once_less_where_the_largest_has_run(
        self, session: Any, golden: GoldenSamples, sizes: tuple[int, ...], runs: list[int]
    ) -> None:
        warm_up(session, sizes, golden, already=True)
        assert session.batches == runs

    def test_it_stops_at_the_first_size_that_made_up_inputs_fail_at(self, session: Any) -> None:
        run = session.run

        def fail_at_four(feeds: Any) -> Any:
            if len(feeds["x"]) == 4:
                raise SignatureError("refused", expected="2", got="4")
            return run(feeds)

        session.run = fail_at_four
        note = warm_up(session, (1, 2, 4, 8), MadeUp())
        assert note == "a made-up batch of 4 fails: refused: expected 2, got 4"
        assert session.batches == [1, 1, 2, 2]

    def test_golden_samples_must_not_fail_at_any_size(self, session: Any, golden: GoldenSamples) -> None:
        session.engine.run_error = ExecutionError("no memory")
        with pytest.raises(ExecutionError):
            warm_up(session, (1,), golden)

    def test_a_fault_of_ours_is_not_taken_for_one_of_the_graph(self, session: Any) -> None:
        session.engine.run_error = ZeroDivisionError()
        with pytest.raises(ZeroDivisionError):
            warm_up(session, (1,), MadeUp())


class TestRepeated:
    @pytest.mark.parametrize(("size", "rows"), [(1, [0]), (3, [0, 1, 2]), (4, [0, 1, 2, 0])])
    def test_fewer_and_more_than_there_are(self, size: int, rows: list[int]) -> None:
        samples = {"x": np.arange(3), "names": np.array(["a", "b", "c"], np.object_)}
        found = repeated(samples, size)
        np.testing.assert_array_equal(found["x"], rows)
        np.testing.assert_array_equal(found["names"], samples["names"][rows])

    def test_makes_copies(self) -> None:
        samples = {"x": np.arange(3)}
        repeated(samples, 3)["x"][0] = 7
        assert samples["x"][0] == 0

    def test_keeps_element_types(self) -> None:
        samples = {dtype: np.zeros((2, 1), dtype) for dtype in ("float16", "uint8", "bool", "int64")}
        assert {name: str(array.dtype) for name, array in repeated(samples, 3).items()} == {
            name: name for name in samples
        }
