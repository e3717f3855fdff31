"""Loading graphs in ONNX Runtime: options, providers, prepacked and shared weights, custom operators."""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnx_ir
import onnxruntime
import pytest
import zoo
from graphs import graph as graph_of
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test.loader import DATA_DIR

from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine, loading
from graphkiln_backend.engines.onnxruntime.loading import CPU as CPU_PROVIDER
from graphkiln_backend.engines.onnxruntime.loading import (
    CUDA,
    WEIGHTS,
    SharedWeights,
    align_prepacked,
    digest,
    hint_for,
    register,
    save_optimized,
    select_provider,
    session_options,
)
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import CUDA_KEYS

CONFIG = SessionConfig(engine="onnxruntime", device=CPU, threads=1, spin=False, reason="test")


def test_optimized_graph_of_ir_version_3_keeps_its_inputs(tmp_path: Path) -> None:
    """ONNX Runtime saves what it folds as inputs there: every request would lack them."""
    light = Path(DATA_DIR, "light", "light_squeezenet.onnx")
    save_optimized(light, session_options(CONFIG), tmp_path / "optimized.onnx")
    with (
        OnnxRuntimeEngine().build(tmp_path / "optimized.onnx", CONFIG) as optimized,
        OnnxRuntimeEngine().build(light, CONFIG) as saved,
    ):
        assert optimized.signature == saved.signature


def test_products_of_4_bit_weights_compute_in_fp32(tmp_path: Path) -> None:
    """ONNX Runtime rounds the activations of such a product to int8 by default: an error of 1% here."""
    nodes = [
        helper.make_node("DequantizeLinear", ["q", "scale"], ["w"]),
        helper.make_node("MatMul", ["x", "w"], ["y"]),
    ]
    model = zoo.model(
        nodes, [zoo.value("x", ["b", 3])], [zoo.value("y", ["b", 2])], {"scale": np.float32(0.5)}, opset=21, ir=10
    )
    weights = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    model.graph.initializer.append(helper.make_tensor("q", TensorProto.UINT4, [3, 2], weights.astype(int).ravel()))
    (tmp_path / "4bit.onnx").write_bytes(model.SerializeToString())
    x = np.float32([[100, 0.3, -0.4], [-90, 0.2, 0.7]])
    with OnnxRuntimeEngine().build(tmp_path / "4bit.onnx", CONFIG) as session:
        np.testing.assert_allclose(session.run({"x": x})["y"], x @ (weights / 2), rtol=1e-6)


@pytest.mark.parametrize(("saturates", "kind"), [(False, TensorProto.INT8), (True, TensorProto.UINT8)])
def test_type_of_int8_weights_suits_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saturates: bool, kind: int
) -> None:
    """VNNI multiplies uint8 by int8: with weights in uint8 ResNet-50 took three times as long."""
    monkeypatch.setattr(loading, "saturates_products_of_bytes", lambda: saturates)
    nodes = [
        helper.make_node("QuantizeLinear", ["x", "scale", "middle"], ["xq"]),
        helper.make_node("DequantizeLinear", ["xq", "scale", "middle"], ["xf"]),
        helper.make_node("DequantizeLinear", ["q", "scale", "zero"], ["w"]),
        helper.make_node("Conv", ["xf", "w"], ["yf"]),
        helper.make_node("QuantizeLinear", ["yf", "scale", "middle"], ["yq"]),
        helper.make_node("DequantizeLinear", ["yq", "scale", "middle"], ["y"]),
    ]
    constants = {"scale": np.float32(0.5), "middle": np.uint8(128), "zero": np.int8(0)}
    constants["q"] = np.linspace(-128, 127, 32).astype(np.int8).reshape(4, 8, 1, 1)
    model = zoo.model(nodes, [zoo.value("x", ["b", 8, 2, 2])], [zoo.value("y", ["b", 4, 2, 2])], constants)
    (tmp_path / "int8.onnx").write_bytes(model.SerializeToString())
    save_optimized(tmp_path / "int8.onnx", session_options(CONFIG), tmp_path / "optimized.onnx")
    graph = onnx.load(tmp_path / "optimized.onnx").graph
    (product,) = (node for node in graph.node if node.op_type == "QLinearConv")
    assert [tensor.data_type for tensor in graph.initializer if tensor.name == product.input[3]] == [kind]


# No product of these is a multiple of 16, a register of float32.
SIZES = [(100, 3), (3, 101), (101, 50)]


def products(*, inside: bool = False) -> onnx.ModelProto:
    """A chain of matrix products, or the last of them in both branches of an If."""
    names = [f"w{index}" for index in range(len(SIZES))]
    weights = [
        numpy_helper.from_array(np.random.default_rng(index).standard_normal(size).astype(np.float32), names[index])
        for index, size in enumerate(SIZES)
    ]
    x, y = (
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name, width in (("x", 100), ("y", 50))
    )
    nodes = [helper.make_node("MatMul", ["x", "w0"], ["a"]), helper.make_node("MatMul", ["a", "w1"], ["b"])]
    last = helper.make_node("MatMul", ["b", "w2"], ["y"])
    if inside:
        out = [helper.make_tensor_value_info("z", TensorProto.FLOAT, None)]
        body = [
            helper.make_graph([helper.make_node("MatMul", ["b", "v"], ["z"])], "branch", [], out, [renamed])
            for renamed in (numpy_helper.from_array(numpy_helper.to_array(weights[2]), "v") for _ in range(2))
        ]
        nodes.append(helper.make_node("ReduceMax", ["x"], ["most"], keepdims=0))
        nodes.append(helper.make_node("Cast", ["most"], ["go"], to=TensorProto.BOOL))
        last = helper.make_node("If", ["go"], ["y"], then_branch=body[0], else_branch=body[1])
        weights = weights[:2]
    graph = helper.make_graph([*nodes, last], "g", [x], [y], weights)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def run(graph: Path, *, optimize: bool) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    if not optimize:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
    return np.asarray(session.run(None, {"x": np.random.default_rng(9).random((2, 100), np.float32)})[0])


def offsets(graph: Path) -> list[int]:
    text = onnx.printer.to_text(onnx.load(str(graph), load_external_data=False))
    return [int(part.partition(";")[0]) for part in _blobs(text)]


def _blobs(text: str) -> list[str]:
    values = [line for line in text.replace('"', "\n").splitlines() if "|" in line and ";" in line]
    return [blob for value in values for blob in value.split("|")[1:]]


@pytest.mark.parametrize("inside", [False, True])
def test_mapped_weights_are_aligned(tmp_path: Path, *, inside: bool) -> None:
    source, copy = tmp_path / "model.onnx", tmp_path / "copy" / "graph.onnx"
    copy.parent.mkdir()
    onnx.save(products(inside=inside), source)
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.save_external_prepacked_constant_initializers", "1")
    save_optimized(source, options, copy)
    assert offsets(copy)
    assert [offset for offset in offsets(copy) if offset % 64] == []
    np.testing.assert_allclose(run(copy, optimize=False), run(source, optimize=True), rtol=1e-5)


def test_aligned_weights_are_unchanged(tmp_path: Path) -> None:
    onnx.save(products(), tmp_path / "graph.onnx")
    before = (tmp_path / "graph.onnx").read_bytes()
    align_prepacked(tmp_path / "graph.onnx", tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    align_prepacked(tmp_path / "graph.onnx", tmp_path / WEIGHTS)
    assert (tmp_path / "graph.onnx").read_bytes() == before
    assert (tmp_path / WEIGHTS).read_bytes() == b"weights"


def test_only_unaligned_weights_are_moved(tmp_path: Path) -> None:
    model = products()
    tensor = model.graph.initializer[0]
    tensor.external_data.add(key="prepacked_0", value="MatMul+7|64;3;0|70;5;0")
    (tmp_path / "graph.onnx").write_bytes(model.SerializeToString())
    (tmp_path / WEIGHTS).write_bytes(bytes(70) + b"inner" + bytes(3))
    align_prepacked(tmp_path / "graph.onnx", tmp_path / WEIGHTS)
    changed = onnx.load(str(tmp_path / "graph.onnx"), load_external_data=False)
    assert changed.graph.initializer[0].external_data[0].value == "MatMul+7|64;3;0|128;5;0"
    assert (tmp_path / WEIGHTS).read_bytes()[128:] == b"inner"


GPU_CONFIG = SessionConfig(engine="onnxruntime", device=Device.gpu(1), threads=1, spin=False, reason="test")


class TestProvider:
    def test_options_of_cuda(self) -> None:
        config = replace(
            GPU_CONFIG, layout="nhwc", conv_search="heuristic", options={"gpu_mem_limit": "5", "use_tf32": "1"}
        )
        assert select_provider(config)[1] == {
            "device_id": "1",
            "use_tf32": "1",
            "prefer_nhwc": "1",
            "cudnn_conv_algo_search": "HEURISTIC",
            "gpu_mem_limit": "5",
        }

    def test_options_are_known_to_the_provider(self) -> None:
        known = Path(__file__).with_name("cuda_options.txt").read_text().split("\n\n")[1].split()
        every = replace(GPU_CONFIG, precision=Precision.TF32, layout="nhwc", conv_search="exhaustive")
        assert {*select_provider(every)[1], *CUDA_KEYS, "enable_cuda_graph"} <= set(known)

    def test_build_without_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CPU_PROVIDER])
        support = OnnxRuntimeEngine().probe(Device.gpu(0))
        assert not support.ok
        assert "pip install 'graphkiln[gpu]'" in support.reason


class TestProbe:
    def test_missing_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [CUDA, CPU_PROVIDER])
        monkeypatch.setattr("graphkiln_backend.engines.hardware.gpus", lambda: ())
        support = OnnxRuntimeEngine().probe(Device.gpu(1))
        assert not support.ok
        assert "there is no GPU 1 here; GPUs: none" in support.reason


@pytest.fixture
def graph(digits: Path, tmp_path: Path) -> Path:
    return shutil.copytree(digits / "1", tmp_path / "version") / "model.onnx"


@pytest.fixture
def shared(tmp_path: Path) -> SessionConfig:
    (tmp_path / "shared").mkdir()
    return dataclasses.replace(CONFIG, shared_folder=tmp_path / "shared")


def test_shared_weights_compute_the_same_bits(graph: Path, shared: SessionConfig) -> None:
    feeds = {"INPUT_0": np.random.default_rng(0).normal(size=(3, 1, 32, 32)).astype(np.float32)}
    with OnnxRuntimeEngine().build(graph, CONFIG) as alone, OnnxRuntimeEngine().build(graph, shared) as sharing:
        np.testing.assert_array_equal(alone.run(feeds)["OUTPUT_0"], sharing.run(feeds)["OUTPUT_0"])
        assert alone.signature == sharing.signature
        maps = Path("/proc/self/maps").read_text()
    assert WEIGHTS in maps, "the weights are not mapped from the shared file"
    assert not list((shared.shared_folder or graph).glob("*/")), "the copy was not removed"


def test_concurrent_instances_make_one_copy(graph: Path, tmp_path: Path) -> None:
    made: list[Path] = []

    def save(path: Path) -> None:
        made.append(path)
        path.write_bytes(b"graph")

    with ThreadPoolExecutor(8) as pool:
        copies = list(pool.map(lambda _: SharedWeights(tmp_path, graph, "", save), range(16)))
    assert len(made) == 1
    assert {copy.path.read_bytes() for copy in copies} == {b"graph"}
    for copy in copies:
        copy.close()
    assert not list(tmp_path.glob("*/graph.onnx"))


def test_changed_graph_or_option_makes_a_new_copy(graph: Path, tmp_path: Path) -> None:
    def save(path: Path) -> None:
        path.write_bytes(b"")

    def path(options: str) -> Path:
        copy = stack.enter_context(SharedWeights(tmp_path, graph, options, save))
        return copy.path

    with ExitStack() as stack:
        first = path("a")
        assert path("a") == first
        assert path("b") != first
        os.utime(graph.parent / "golden.npz", ns=(1, 1))
        assert path("a") != first


def test_unwritable_copy_is_logged(graph: Path, tmp_path: Path, logged: list[str]) -> None:
    config = dataclasses.replace(CONFIG, shared_folder=tmp_path / "missing")
    with OnnxRuntimeEngine().build(graph, CONFIG) as alone, OnnxRuntimeEngine().build(graph, config) as session:
        assert session.signature == alone.signature
    assert logged[0].startswith(f"the instances of {graph} do not share its weights")


def test_dead_process_releases_the_copy(graph: Path, tmp_path: Path) -> None:
    """Its lock ends with it: the next one that closes the copy removes it."""
    program = (
        "import os, pathlib, sys\n"
        "from graphkiln_backend.engines.onnxruntime.loading import SharedWeights\n"
        "folder, graph = map(pathlib.Path, sys.argv[1:])\n"
        "SharedWeights(folder, graph, '', lambda path: path.write_bytes(b'graph'))\n"
        "os._exit(1)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path), str(graph)], check=False)
    assert list(tmp_path.glob("*/graph.onnx")), "what a dead process wrote is there for the next one"
    with SharedWeights(tmp_path, graph, "", lambda _: pytest.fail("was there already")):
        pass
    assert not list(tmp_path.glob("*/graph.onnx"))


def test_copy_in_use_by_another_process_stays(graph: Path, tmp_path: Path) -> None:
    program = (
        "import pathlib, sys\n"
        "from graphkiln_backend.engines.onnxruntime.loading import SharedWeights\n"
        "folder, graph = map(pathlib.Path, sys.argv[1:])\n"
        "with SharedWeights(folder, graph, '', lambda path: path.write_bytes(b'graph')):\n"
        "    print('open', flush=True)\n"
        "    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(graph)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "open\n"
        shared = SharedWeights(tmp_path, graph, "", lambda _: pytest.fail("was there already"))
        shared.close()
        assert shared.path.exists()
        process.communicate("")
    assert not shared.path.exists()


@pytest.mark.parametrize("content", [b"", b"no library"])
def test_library_that_does_not_load(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "lib.so").write_bytes(content)
    with pytest.raises(LoweringError, match=r"custom operators .*/lib.so does not load"):
        register(onnxruntime.SessionOptions(), [str(tmp_path / "lib.so")])


def test_library_without_operators() -> None:
    with pytest.raises(LoweringError, match=r"libm.so.6 does not load.*RegisterCustomOps"):
        register(onnxruntime.SessionOptions(), ["libm.so.6"])


def test_digest_of_libraries(tmp_path: Path) -> None:
    library = tmp_path / "lib.so"
    library.write_bytes(b"1")
    first = digest([str(library)])
    library.write_bytes(b"2")
    assert digest([str(library)]) != first
    assert (digest([]), bool(digest(["libm.so.6"]))) == ("", True)


def saved(folder: Path, opset: int) -> Path:
    path = folder / "model.onnx"
    path.write_bytes(zoo.scale(("batch", 3), opset=opset).SerializeToString())
    return path


def test_opset_without_kernels(tmp_path: Path) -> None:
    with pytest.raises(LoweringError, match="operator set 6, and ONNX Runtime computes those from 7 on"):
        OnnxRuntimeEngine().build_reference(saved(tmp_path, 6))


def test_operators_that_are_newer_than_the_runtime(tmp_path: Path) -> None:
    """ONNX Runtime 1.32 reads operator set 28, and has no kernel of its QuantizeLinear."""
    model = graph_of("(float[n,3] x) => (uint8[n,3] y) { y = QuantizeLinear(x, s) }", opset=28, s=np.float32(1))
    onnx_ir.save(model, tmp_path / "model.onnx")
    with pytest.raises(LoweringError, match=r"QuantizeLinear\(28\).*convert_version\(model, 25\)"):
        OnnxRuntimeEngine().build_reference(tmp_path / "model.onnx")


@pytest.mark.parametrize(
    ("error", "hint"), [("x is not a registered function/op", "op_library_filename"), ("construct locale", "")]
)
def test_hint_for_an_error(tmp_path: Path, error: str, hint: str) -> None:
    found = hint_for(error, saved(tmp_path, 18))
    assert hint in found
    assert bool(hint) == bool(found)


@pytest.mark.parametrize("opset", [19, 21, 23])
@pytest.mark.parametrize("moved", ["Reshape(d, flat)", "Transpose<perm=[0,2,1]>(d)", "Unsqueeze(d, one)"])
def test_int8_activations_of_any_opset(opset: int, moved: str, tmp_path: Path) -> None:
    """Since opset 21 ONNX Runtime fails to make int8 activations uint8 before a node that only moves values."""
    nodes = f"q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) r = {moved} v = DequantizeLinear(w, s, z)"
    model = graph_of(
        f"(float[n,2,6] x) => (float[k,l,m] y) {{ {nodes} p = MatMul(r, v) y = Reshape(p, rows) }}".replace(
            "2,6]", "6,2]" if "Transpose" in moved else "2,6]"
        ),
        opset=opset,
        s=np.float32(0.02),
        z=np.int8(0),
        w=np.arange(-12, 12, dtype=np.int8).reshape(6, 4),
        flat=np.array([-1, 6]),
        one=np.array([1]),
        rows=np.array([-1, 2, 4]),
    )
    onnx_ir.save(model, tmp_path / "model.onnx")
    x = np.linspace(-2, 2, 36, dtype=np.float32).reshape((3, 6, 2) if "Transpose" in moved else (3, 2, 6))
    engine = OnnxRuntimeEngine()
    with (
        engine.build_reference(tmp_path / "model.onnx") as reference,
        engine.build(tmp_path / "model.onnx", CONFIG) as session,
    ):
        np.testing.assert_allclose(session.run({"x": x})["y"], reference.run({"x": x})["y"], rtol=1e-5, atol=1e-5)
        assert session.placement({"x": x}).products == {Precision.INT8: 1}
