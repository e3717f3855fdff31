"""The contract of `engines.base` on both engines for the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo

from graphkiln_backend.engines.base import Engine, Session, SessionConfig, SessionTuning, Support
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import LoweringError, SignatureError
from graphkiln_backend.graph.precision import Precision

Build = Callable[[onnx.ModelProto], Session]

NUMERIC = [dtype for dtype in DType if dtype is not DType.BYTES]


def config_of(name: str) -> SessionConfig:
    return SessionConfig(engine=name, device=CPU, threads=1, spin=False, reason="test")


@pytest.fixture(params=["onnxruntime", "openvino"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engine(name: str) -> Engine:
    return load_engine(name)


@pytest.fixture
def build(name: str, engine: Engine, tmp_path: Path) -> Build:
    def build(model: onnx.ModelProto) -> Session:
        return engine.build(zoo.add(tmp_path, "m", model) / "model.onnx", config_of(name))

    return build


class TestEngine:
    def test_probe(self, engine: Engine) -> None:
        assert engine.probe(CPU) == Support(ok=True)
        refused = engine.probe(Device.gpu(3))
        assert not refused.ok
        assert refused.reason

    def test_identity_depends_only_on_relevant_settings(self, engine: Engine, name: str) -> None:
        config = config_of(name)
        first = engine.identity(config)
        assert first
        assert all(isinstance(text, str) for pair in first.items() for text in pair)
        other = replace(config, reason="another", shared_folder=Path("/nowhere"))
        assert engine.identity(other) == first

    def test_compiled_graph_needs_no_source(self, engine: Engine, name: str, tmp_path: Path) -> None:
        graph = zoo.add(tmp_path, "m", zoo.sum_and_difference()) / "model.onnx"
        (tmp_path / "compiled").mkdir()
        engine.compile(graph, config_of(name), tmp_path / "compiled")
        graph.unlink()
        feeds = {"b": np.full((3, 2), 5, np.float32), "a": np.ones((3, 2), np.float32)}
        with engine.build(graph, config_of(name), tmp_path / "compiled") as session:
            found = session.run(feeds)
        np.testing.assert_array_equal(found["sum"], np.full((3, 2), 6))
        np.testing.assert_array_equal(found["difference"], np.full((3, 2), 4))

    @pytest.mark.parametrize("content", [b"", b"nonsense"])
    def test_damaged_compiled_graph(self, engine: Engine, name: str, tmp_path: Path, content: bytes) -> None:
        graph = zoo.add(tmp_path, "m", zoo.scale(("batch", 3))) / "model.onnx"
        (tmp_path / "compiled").mkdir()
        engine.compile(graph, config_of(name), tmp_path / "compiled")
        for path in (tmp_path / "compiled").iterdir():
            path.write_bytes(content)
        with pytest.raises(LoweringError, match="cannot load"):
            engine.build(graph, config_of(name), tmp_path / "compiled")

    def test_unknown_operator(self, build: Build) -> None:
        shape = ("batch", 3)
        nodes = [onnx.helper.make_node("Frobnicate", ["x"], ["y"])]
        with pytest.raises(LoweringError) as caught:
            build(zoo.model(nodes, [zoo.value("x", shape)], [zoo.value("y", shape)]))
        assert "Frobnicate" in str(caught.value)

    def test_outputs_that_are_no_tensors(self, build: Build) -> None:
        with pytest.raises(LoweringError):
            build(zoo.with_sequence_output())


class TestSession:
    @pytest.mark.parametrize("dtype", NUMERIC)
    def test_every_type(self, build: Build, dtype: DType, request: pytest.FixtureRequest) -> None:
        if dtype is DType.FP64 and "openvino" in request.node.callspec.id:
            with pytest.raises(LoweringError, match="OpenVINO computes FP64 in FP32"):
                build(zoo.identity(("batch", "n"), zoo.DTYPES[dtype]))
            return
        array = np.array([[0, 1, 2], [1, 0, 3]]).astype(dtype.numpy)
        with build(zoo.identity(("batch", "n"), zoo.DTYPES[dtype])) as session:
            assert session.signature.inputs[0].dtype is dtype
            found = session.run({"x": array})["y"]
        assert found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)

    @pytest.mark.parametrize("shape", [(), (0, 3), (1, 3), (5, 3), (3, 0)])
    def test_every_shape(self, build: Build, shape: tuple[int, ...]) -> None:
        dims: Any = ("batch", "n") if shape else ()
        with build(zoo.scale(dims)) as session:
            found = session.run({"x": np.ones(shape, np.float32)})["y"]
        np.testing.assert_array_equal(found, np.full(shape, 2, np.float32))

    @pytest.mark.parametrize("requested", [["difference", "sum"], ["sum"]])
    def test_requested_outputs_and_order(self, build: Build, requested: list[str]) -> None:
        feeds = {"a": np.ones((1, 2), np.float32), "b": np.full((1, 2), 3, np.float32)}
        with build(zoo.sum_and_difference()) as session:
            found = session.run(feeds, requested)
            assert list(session.run(feeds)) == [spec.name for spec in session.signature.outputs]
        assert list(found) == requested
        assert {name: array[0, 0] for name, array in found.items()} == {
            name: {"sum": 4, "difference": 2}[name] for name in requested
        }

    @pytest.mark.parametrize(
        "array",
        [
            np.arange(12, dtype=np.float32).reshape(3, 4).T,
            np.arange(24, dtype=np.float32).reshape(4, 6)[:, ::2],
            np.arange(12, dtype=np.float32).reshape(4, 3)[::-1],
        ],
        ids=["transposed", "every other", "backwards"],
    )
    def test_non_contiguous_feeds(self, build: Build, array: Any) -> None:
        with build(zoo.scale(("batch", 3))) as session:
            np.testing.assert_array_equal(session.run({"x": array})["y"], array * 2)

    @pytest.mark.parametrize("model", [zoo.scale(("batch", 3)), zoo.identity(("batch", 3))], ids=["scale", "identity"])
    def test_feeds_and_outputs_are_not_shared(self, build: Build, model: onnx.ModelProto) -> None:
        array = np.ones((2, 3), np.float32)
        with build(model) as session:
            first = session.run({"x": array})["y"]
            np.testing.assert_array_equal(array, np.ones((2, 3)))
            expected = first.copy()
            array[:] = 9
            session.run({"x": array})
            np.testing.assert_array_equal(first, expected)
            assert first.flags.writeable
        np.testing.assert_array_equal(first, expected)

    @pytest.mark.parametrize(
        "feeds",
        [
            {"x": np.ones((2, 4), np.float32)},
            {"x": np.ones((2, 3, 1), np.float32)},
        ],
        ids=["size", "rank"],
    )
    def test_session_serves_after_invalid_feeds(self, build: Build, feeds: dict[str, Any]) -> None:
        with build(zoo.scale(("batch", 3))) as session:
            with pytest.raises(SignatureError) as caught:
                session.run(feeds)
            assert "x FP32[" in caught.value.expected
            np.testing.assert_array_equal(session.run({"x": np.ones((1, 3), np.float32)})["y"], [[2, 2, 2]])

    def test_placement_counts_products_by_precision(self, build: Build) -> None:
        weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
        nodes = [
            onnx.helper.make_node("MatMul", ["x", "w"], ["h"]),
            onnx.helper.make_node("Relu", ["h"], ["r"]),
            onnx.helper.make_node("MatMul", ["r", "w"], ["y"]),
        ]
        shape = ("batch", 64)
        model = zoo.model(nodes, [zoo.value("x", shape)], [zoo.value("y", shape)], {"w": weight})
        with build(model) as session:
            placement = session.placement({"x": np.ones((2, 64), np.float32)})
        assert placement.products == {Precision.FP32: 2}
        assert placement.precision is Precision.FP32
        assert sum(placement.nodes.values()) >= 2
        assert not placement.elsewhere


class TestTexts:
    def test_text_of_a_tuning_is_stable(self) -> None:
        """It is part of cache keys: another text would make all entries unreachable."""
        assert str(SessionTuning(memory_pattern=True)) == (
            "SessionTuning(graph_level='all', parallel=False, inter_threads=0, memory_arena=True, "
            "memory_pattern=True, arena_shrinkage='', config_entries={})"
        )
        tuning = SessionTuning(graph_level="basic", parallel=True, config_entries={"session.x": "1"})
        assert "graph_level='basic', parallel=True" in str(tuning)
        assert "config_entries={'session.x': '1'}" in str(tuning)
