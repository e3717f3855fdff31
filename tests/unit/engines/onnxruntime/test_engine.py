"""ONNX Runtime's engine: what it compiles and under which keys, and which sessions it builds."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines.base import REWRITES_OFF, SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, engine, loading
from graphkiln_backend.engines.onnxruntime import session as session_module
from graphkiln_backend.engines.onnxruntime.loading import WEIGHTS, open_session
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import LoweringError

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


def large(tmp_path: Path) -> Path:
    """A product with a weight that is worth a file of its own, and an addition that is folded away."""
    nodes = [
        onnx.helper.make_node("Add", ["w", "zero"], ["sum"]),
        onnx.helper.make_node("MatMul", ["x", "sum"], ["y"]),
    ]
    constants = {"w": np.eye(64, dtype=np.float32), "zero": np.zeros((64, 64), np.float32)}
    shape = ("batch", 64)
    model = zoo.model(nodes, [zoo.value("x", shape)], [zoo.value("y", shape)], constants)
    return zoo.add(tmp_path, "m", model) / "model.onnx"


class TestIdentity:
    def test_identity_is_stable(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine, "saturates_products_of_bytes", lambda: False)
        assert OnnxRuntimeEngine().identity(CONFIG) == {
            "onnxruntime": onnxruntime.__version__,
            "tuning": "SessionTuning(graph_level='all', parallel=False, inter_threads=0, memory_arena=True, "
            "memory_pattern=True, arena_shrinkage='', config_entries={})",
        }

    def test_identity_depends_on_saturation(self, monkeypatch: pytest.MonkeyPatch) -> None:
        keys = []
        for saturates in (False, True):
            monkeypatch.setattr(engine, "saturates_products_of_bytes", lambda saturates=saturates: saturates)
            keys.append(OnnxRuntimeEngine().identity(CONFIG))
        assert keys[0] != keys[1]

    @pytest.mark.parametrize(
        "config",
        [replace(CONFIG, device=Device.gpu(0)), replace(CONFIG, tuning=SessionTuning(graph_level="off"))],
        ids=["gpu", "off"],
    )
    def test_no_identity_without_compilation(self, config: SessionConfig) -> None:
        assert OnnxRuntimeEngine().identity(config) == {}


class TestCompile:
    @pytest.mark.parametrize("level", ["all", "extended", "basic"])
    def test_optimization_level_is_portable(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, level: Any) -> None:
        """Optimizations beyond `extended` depend on the processor."""
        levels = []
        monkeypatch.setattr(
            engine, "save_optimized", lambda _, options, __: levels.append(options.graph_optimization_level)
        )
        OnnxRuntimeEngine().compile(tmp_path, replace(CONFIG, tuning=SessionTuning(graph_level=level)), tmp_path)
        basic, extended = (
            onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
            onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
        )
        assert levels == [basic if level == "basic" else extended]

    def test_compiled_weights_are_mapped(self, tmp_path: Path) -> None:
        folder = tmp_path / "compiled"
        folder.mkdir()
        graph = large(tmp_path)
        OnnxRuntimeEngine().compile(graph, CONFIG, folder)
        as_saved = replace(CONFIG, tuning=SessionTuning(config_entries={"session.disable_prepacking": "1"}))
        with OnnxRuntimeEngine().build(graph, as_saved, folder) as session:
            found = session.run({"x": np.ones((2, 64), np.float32)})["y"]
            assert str(folder / WEIGHTS) in Path("/proc/self/maps").read_text()
        np.testing.assert_array_equal(found, np.ones((2, 64)))


def test_int8_sums_do_not_saturate(tmp_path: Path) -> None:
    """On CPUs without VNNI, ONNX Runtime's default is an error of 45% here."""
    model, feeds = zoo.integer_product()
    path = zoo.add(tmp_path, "m", model) / "model.onnx"
    OnnxRuntimeEngine().compile(path, CONFIG, tmp_path)
    with (
        OnnxRuntimeEngine().build_reference(path) as plain,
        OnnxRuntimeEngine().build(path, CONFIG) as fast,
        OnnxRuntimeEngine().build(path, CONFIG, tmp_path) as compiled,
    ):
        expected = plain.run(feeds)["y"]
        for session in (fast, compiled):
            np.testing.assert_allclose(session.run(feeds)["y"], expected, rtol=1e-5)


class TestShared:
    @pytest.fixture
    def config(self, tmp_path: Path) -> SessionConfig:
        (tmp_path / "shared").mkdir()
        return replace(CONFIG, shared_folder=tmp_path / "shared")

    def test_refused_graph_leaves_no_shared_copy(self, tmp_path: Path, config: SessionConfig) -> None:
        graph = zoo.add(tmp_path, "m", zoo.with_sequence_output()) / "model.onnx"
        with pytest.raises(LoweringError, match=r"ONNX Runtime cannot serve .*seq\(tensor\(float\)\)"):
            OnnxRuntimeEngine().build(graph, config)
        assert not list((tmp_path / "shared").glob("*/"))


class TestRewrites:
    """ONNX Runtime's own rewrites of a valid graph may fail."""

    @pytest.fixture
    def graph(self, tmp_path: Path) -> Path:
        """With 1.32, "Invalid model" once the Cast, which does nothing, is dropped."""
        nodes = [
            onnx.helper.make_node("Cast", ["x"], ["same"], to=onnx.TensorProto.FLOAT),
            onnx.helper.make_node("Div", ["one", "other"], ["ratio"]),
            onnx.helper.make_node("Mul", ["ratio", "same"], ["y"]),
        ]
        constants = {"one": np.float32(1), "other": np.float32(0.5)}
        model = zoo.model(nodes, [zoo.value("x", ("n", 4))], [zoo.value("y", ("n", 4))], constants)
        return zoo.add(tmp_path, "m", model) / "model.onnx"

    @pytest.mark.parametrize("planted", [False, True])
    @pytest.mark.parametrize("way", ["alone", "shared", "compiled"])
    def test_graph_is_loaded_as_saved(
        self, tmp_path: Path, graph: Path, monkeypatch: pytest.MonkeyPatch, way: str, planted: bool
    ) -> None:
        def fail(path: Path, options: Any, providers: Any) -> onnxruntime.InferenceSession:
            if options.graph_optimization_level != onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL:
                raise LoweringError("ONNX Runtime cannot load it", attempts=("Invalid model",))
            return open_session(path, options, providers)

        if planted:
            monkeypatch.setattr(loading, "open_session", fail)
            monkeypatch.setattr(session_module, "open_session", fail)
        folder = tmp_path / way
        folder.mkdir()
        config = replace(CONFIG, shared_folder=folder) if way == "shared" else CONFIG
        if way == "compiled":
            OnnxRuntimeEngine().compile(graph, CONFIG, folder)
        feeds = {"x": np.arange(8, dtype=np.float32).reshape(2, 4)}
        with OnnxRuntimeEngine().build(graph, config, folder if way == "compiled" else None) as session:
            np.testing.assert_array_equal(session.run(feeds)["y"], 2 * feeds["x"])
            if planted:
                assert session.notes == (f"{REWRITES_OFF}: Invalid model",)
                assert session.placement(feeds).nodes == {"CPUExecutionProvider": 3}

    def test_error_of_the_first_try_is_raised(self, tmp_path: Path, graph: Path) -> None:
        graph.write_bytes(graph.read_bytes()[:-9])
        for attempt in (OnnxRuntimeEngine().build, partial(OnnxRuntimeEngine().compile, folder=tmp_path)):
            with pytest.raises(LoweringError, match="cannot load"):
                attempt(graph, CONFIG)

    def test_no_note_otherwise(self, tmp_path: Path) -> None:
        with OnnxRuntimeEngine().build(large(tmp_path), CONFIG) as session:
            assert session.notes == ()


def test_no_usage_reports(tmp_path: Path) -> None:
    """Neither an identifier of the machine nor reports, which it would send."""
    text = '<ir_version: 8, opset_import: ["" : 18]> g (float[b,2] x) => (float[b,2] y) { y = Abs(x) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    (tmp_path / "home").mkdir()
    program = (
        "import sys; from pathlib import Path; from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine\n"
        "OnnxRuntimeEngine().build_reference(Path(sys.argv[1])).close()\n"
    )
    environment = {key: text for key, text in os.environ.items() if not key.startswith(("XDG_", "ORT_"))}
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m.onnx")],
        env={**environment, "HOME": str(tmp_path / "home")},
        check=True,
        timeout=60,
    )
    assert list((tmp_path / "home").rglob("*")) == []
