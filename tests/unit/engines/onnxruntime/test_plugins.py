"""Execution providers of other packages, by OpenVINO's plugin for ONNX Runtime."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import zoo
from onnx import TensorProto, helper

from graphkiln_backend.engines.base import Session, SessionConfig, SessionTuning
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, plugins
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError, SignatureError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import check_placement

NAME = "OpenVINOExecutionProvider"
CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test", providers=("OpenVINO",))


def build(path: Path, *providers: str) -> Session:
    return OnnxRuntimeEngine().build(path, replace(CONFIG, providers=providers or ("OpenVINO",)))


def save(tmp_path: Path, nodes: list[onnx.NodeProto], dtype: int = TensorProto.FLOAT, weight: int = 0) -> Path:
    shape = ("n", weight or "n")
    constants = {"w": np.random.default_rng(0).standard_normal((weight, weight), np.float32)} if weight else None
    outputs = [
        helper.make_tensor_value_info(name, dtype, None) for node in nodes for name in node.output if name[0] == "y"
    ]
    model = zoo.model(nodes, [zoo.value("x", shape, dtype)], outputs, constants)
    return zoo.add(tmp_path, "m", model) / "model.onnx"


@pytest.fixture
def product(tmp_path: Path) -> Path:
    return save(tmp_path, [helper.make_node("MatMul", ["x", "w"], ["y"])], weight=512)


@pytest.fixture
def partly(tmp_path: Path) -> Path:
    """OpenVINO has no determinants, which decide whether a product of the CPU is computed."""
    then = helper.make_graph([helper.make_node("MatMul", ["x", "x"], ["p"])], "t", [], [zoo.value("p", ("n", "n"))])
    other = helper.make_graph([helper.make_node("Neg", ["x"], ["q"])], "e", [], [zoo.value("q", ("n", "n"))])
    nodes = [
        helper.make_node("MatMul", ["x", "x"], ["y"]),
        helper.make_node("Det", ["x"], ["d"]),
        helper.make_node("Cast", ["d"], ["c"], to=TensorProto.BOOL),
        helper.make_node("If", ["c"], ["y2"], then_branch=then, else_branch=other),
    ]
    return save(tmp_path, nodes)


def test_answers_and_placement(product: Path) -> None:
    feeds = {"x": np.random.default_rng(1).standard_normal((8, 512), np.float32)}
    with OnnxRuntimeEngine().build_reference(product) as reference:
        expected = reference.run(feeds)["y"]
    with build(product) as session:
        found = session.run(feeds)["y"]
        placed = session.placement(feeds)
        assert "onnxruntime with OpenVINO on cpu" in str(CONFIG)
        assert NAME in session.notes[0], "explain shows the release and the device"
    # 0.2% on a processor that computes bf16, if it is not told to keep FP32
    assert np.linalg.norm(found - expected) < 1e-5 * np.linalg.norm(expected)
    assert placed.nodes == {NAME: 1}
    assert placed.products == {Precision.FP32: 1}
    assert placed.elsewhere == ()


def test_the_types_of_a_plugin_with_own_options_are_unknown(product: Path) -> None:
    entries = {f"ep.{NAME.lower()}.load_config": '{"CPU": {"INFERENCE_PRECISION_HINT": "bf16"}}'}
    config = replace(CONFIG, tuning=SessionTuning(config_entries=entries))
    with OnnxRuntimeEngine().build(product, config) as session:
        placed = session.placement({"x": np.ones((1, 512), np.float32)})
    assert placed.products == {"unknown": 1}
    with pytest.raises(LoweringError, match="no product ran in fp32"):
        check_placement(replace(config, precision=Precision.FP32), placed, Precision.FP32)


class TestPluginsWithoutChecks:
    """OpenVINO's plugin in the place of one that graphkiln does not know."""

    @pytest.fixture(autouse=True)
    def _unknown(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugins, "_OPENVINO", "another")

    def test_products_on_the_cpu_are_found_unless_it_is_named(self, partly: Path) -> None:
        feeds = {"x": np.eye(3, dtype=np.float32)}
        with build(partly) as session:
            placed = session.placement(feeds)
            assert set(placed.nodes) == {NAME, "CPUExecutionProvider"}
            assert "not checked" in session.notes[0]
        with build(partly, "OpenVINO", "CPU") as session:
            assert session.placement(feeds).elsewhere == ()

    def test_no_node(self, tmp_path: Path) -> None:
        path = save(tmp_path, [helper.make_node("Det", ["x"], ["y"])])
        with pytest.raises(LoweringError, match="does not compute a node"):
            build(path)


def test_outputs_that_are_inputs_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT)])
    with pytest.raises(LoweringError, match="an output that is an input"):
        build(path)


@pytest.mark.parametrize(
    ("operator", "dtype", "words"),
    [("MatMul", TensorProto.DOUBLE, "FP64 in FP32"), ("Add", TensorProto.INT8, "saturates or widens")],
)
def test_what_openvino_computes_otherwise_is_refused(tmp_path: Path, operator: str, dtype: int, words: str) -> None:
    path = save(tmp_path, [helper.make_node(operator, ["x", "x"], ["y"])], dtype)
    with pytest.raises(LoweringError, match=rf"(?s){words}.*leave providers out"):
        build(path)


def test_what_is_rewritten_for_openvino_is_refused(tmp_path: Path) -> None:
    constants = {"k": np.array([1])}
    nodes = [helper.make_node("TopK", ["x", "k"], ["y", "i"])]
    outputs = [zoo.value("y", ("n", 1)), zoo.value("i", ("n", 1), TensorProto.INT64)]
    path = zoo.add(tmp_path, "m", zoo.model(nodes, [zoo.value("x", ("n", 4))], outputs, constants)) / "model.onnx"
    with pytest.raises(LoweringError, match="returns equal values in any order"):
        build(path)


def test_requests_with_hidden_nan_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, [helper.make_node("Relu", ["x"], ["y"])])
    with build(path) as session, pytest.raises(SignatureError, match="holds NaN"):
        session.run({"x": np.array([[np.nan]], np.float32)})


class TestUnavailable:
    def test_wheel_that_is_not_installed(self, product: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(plugins.pkgutil, "iter_modules", lambda: iter(()))
        with pytest.raises(EngineUnavailable, match=r"not installed.*pip install onnxruntime-ep-openvino"):
            build(product)

    def test_unknown_provider(self, product: Path) -> None:
        with pytest.raises(EngineUnavailable, match=r"unknown provider 'OpenVIN'.*'openvino'"):
            build(product, "OpenVIN")

    def test_missing_device(self, product: Path) -> None:
        with pytest.raises(EngineUnavailable, match=r"no device npu:99 .*its devices: cpu"):
            build(product, "OpenVINO:npu:99")

    def test_library_that_does_not_fit(self, product: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        library = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_shared.so"
        package = tmp_path / "site" / "onnxruntime_ep_acme"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text(f"def get_library_path(): return {str(library)!r}\n")
        monkeypatch.syspath_prepend(package.parent)
        with pytest.raises(EngineUnavailable, match=r"onnxruntime-ep-acme does not load in ONNX Runtime .*CreateEpFac"):
            build(product, "Acme")

    def test_runtime_that_does_not_tell_what_ran(self, product: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delattr(onnxruntime.InferenceSession.__base__, "get_provider_graph_assignment_info")
        with pytest.raises(EngineUnavailable, match=r"does not tell which nodes.*--upgrade onnxruntime"):
            build(product)
