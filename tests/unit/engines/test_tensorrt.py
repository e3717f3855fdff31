"""TensorRT's options, as far as they can be seen without a GPU: names, profiles, the error of a machine without it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines import tensorrt
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.hardware import Gpu
from graphkiln_backend.engines.onnxruntime import loading
from graphkiln_backend.engines.tensorrt import PROVIDER, TensorRtEngine, _options, read_products
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import TENSORRT_KEYS, Settings
from graphkiln_backend.repository.config import parse_json
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.onnx_file import read_signature

CONFIG = SessionConfig(engine="tensorrt", device=Device.gpu(1), threads=1, spin=False, reason="test", largest_batch=16)
NAMES = Path(__file__).with_name("tensorrt_options.txt")


# Written by hand from NVIDIA's documentation ("Engine Inspector" of TensorRT 10.16, "Migrating IEngineInspector Usage
# from TensorRT 10.x to 11.x"), not recorded: no engine was built so far.
TENSORRT_10 = """{"Layers": [
  {"Name": "res4 + bn", "LayerType": "CaskConvolution", "ParameterType": "Convolution",
   "Inputs": [{"Name": "a", "Dimensions": [16, 512, 28, 28],
               "Format/Datatype": "Thirty-two wide channel vectorized row major Int8 format."}],
   "Outputs": [{"Name": "b", "Format/Datatype": "Row major linear FP32"}]},
  {"Name": "stem", "LayerType": "CaskConvolution", "ParameterType": "Convolution",
   "Inputs": [{"Name": "x", "Location": "Device", "Format/Datatype": "Row major linear FP16 format"}], "Outputs": []},
  {"Name": "in", "LayerType": "Reformat",
   "Inputs": [{"Name": "x", "Format/Datatype": "Row major linear FP32"}], "Outputs": []},
  {"Name": "head", "LayerType": "gemm", "Inputs": [{"Name": "c", "Format/Datatype": "N/A due to dynamic shapes"}],
   "Outputs": []}],
 "Bindings": ["x", "b"]}"""
TENSORRT_11 = """{"Layers": [
  {"Name": "res4 + bn", "LayerType": "CaskConvolution", "ParameterType": "Convolution",
   "Inputs": [{"Name": "a", "Format": "Thirty-two wide channel vectorized row major", "Datatype": "Int8"}],
   "Outputs": [{"Name": "b", "Format": "Row major linear", "Datatype": "Float"}]},
  {"Name": "stem", "LayerType": "CaskConvolution", "ParameterType": "Convolution",
   "Inputs": [{"Name": "x", "Format": "Row major linear", "Datatype": "Half"}], "Outputs": []},
  {"Name": "in", "LayerType": "Reformat",
   "Inputs": [{"Name": "x", "Format": "Row major linear", "Datatype": "Float"}], "Outputs": []},
  {"Name": "head", "LayerType": "gemm", "Inputs": [{"Name": "c", "Format": "Row major linear", "Datatype": "BFloat16"}],
   "Outputs": []}],
 "I/O Tensors": [{"Name": "x", "IOMode": "Input", "DataType": "Float", "Dimensions": [1, 3, 224, 224],
                  "Location": "Device", "IsShapeInferenceIO": false}]}"""
NAMES_ONLY = '{"Layers": ["res4 + bn", "stem"], "Bindings": ["x", "b"]}'


@pytest.fixture(autouse=True)
def _tensorrt_10(monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, 10)


def use(monkeypatch: pytest.MonkeyPatch, major: int) -> None:
    """Let ONNX Runtime's provider be linked against a TensorRT."""
    monkeypatch.setattr(tensorrt, "_library", lambda: f"libnvinfer.so.{major}")


def known_options() -> set[str]:
    """Option names in the provider's library where it is installed, else those of the release that the file names."""
    library = Path(onnxruntime.__file__).parent / "capi" / "libonnxruntime_providers_tensorrt.so"
    if not library.exists():
        return set(NAMES.read_text().split("\n\n")[1].split())
    content = library.read_bytes()
    return {name for name in _asked_names() if name.encode() in content}


def _asked_names() -> set[str]:
    refused = {"precision_mode", "trt_cuda_graph_enable"}
    every = dict.fromkeys((key for key in TENSORRT_KEYS if key not in refused), "1")
    lowered = replace(CONFIG, precision=Precision.FP16, options=every)
    return set(_options(lowered, None, Path("folder"))) | set(
        _options(replace(CONFIG, precision=Precision.BF16), None, None)
    )


def test_options_are_known_to_the_provider() -> None:
    assert _asked_names() <= known_options()


def test_precision_options() -> None:
    assert _options(CONFIG, None, None)["trt_fp16_enable"] == "0"
    assert _options(replace(CONFIG, precision=Precision.FP16), None, None)["trt_fp16_enable"] == "1"
    assert _options(replace(CONFIG, precision=Precision.BF16), None, None)["trt_bf16_enable"] == "1"
    assert _options(replace(CONFIG, precision=Precision.INT8), None, None)["trt_int8_enable"] == "1"


class TestTensorRt11:
    @pytest.fixture(autouse=True)
    def _tensorrt_11(self, _tensorrt_10: None, monkeypatch: pytest.MonkeyPatch) -> None:
        use(monkeypatch, 11)

    @pytest.mark.parametrize("precision", [None, Precision.FP16, Precision.BF16, Precision.INT8])
    def test_no_type_is_a_flag(self, precision: Precision | None) -> None:
        assert _options(replace(CONFIG, precision=precision), None, None) == {"device_id": "1"}

    @pytest.mark.parametrize(
        ("name", "value", "way"),
        [
            ("precision_mode", "INT8", "set precision: fp16 or bf16, which puts the types into the graph"),
            ("trt_fp16_enable", "1", "set precision: fp16"),
            ("trt_int8_enable", "True", "--precision int8 --calibration SAMPLES"),
            ("int8_calibration_table_name", "table.flatbuffers", "puts the scales into the graph"),
            ("int8_use_native_calibration_table", "true", "puts the scales into the graph"),
            ("trt_layer_norm_fp32_fallback", "1", "keep normalizations in FP32"),
            ("trt_dla_enable", "1", "DLA is not supported up to TensorRT 11.4"),
        ],
    )
    def test_what_it_dropped_is_refused(self, name: str, value: str, way: str) -> None:
        with pytest.raises(LoweringError, match=rf"needs TensorRT 10 or older.*uses TensorRT 11.*{way}"):
            _options(replace(CONFIG, options={name: value}), None, None)
        assert _options(replace(CONFIG, options={name: "0"}), None, None) == {"device_id": "1"}

    def test_the_accelerator_block_of_triton(self, digits: Path) -> None:
        accelerator = {"name": "tensorrt", "parameters": {"precision_mode": "FP16"}}
        accelerators = {"gpu_execution_accelerator": [accelerator]}
        document = json.dumps({"optimization": {"execution_accelerators": accelerators}})
        settings = Settings.from_config(ModelConfig.from_protobuf(parse_json(document), has_gpu=True), Device.gpu(0))
        config = replace(CONFIG, precision=settings.precision, options=settings.options["tensorrt"])
        with pytest.raises(LoweringError, match="precision_mode needs TensorRT 10 or older"):
            TensorRtEngine().build(digits / "1" / "model.onnx", config)


@pytest.mark.parametrize(
    ("information", "expected"),
    [
        (TENSORRT_10, {Precision.INT8: 1, Precision.FP16: 1, "unknown": 1}),
        (TENSORRT_11, {Precision.INT8: 1, Precision.FP16: 1, Precision.BF16: 1}),
        (NAMES_ONLY, {}),
    ],
    ids=["10", "11", "names"],
)
def test_products_of_an_engine(information: str, expected: dict[str, int]) -> None:
    assert read_products(information) == expected


def test_the_library_is_read_from_the_provider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    provider = tmp_path / "libonnxruntime_providers_tensorrt.so"
    provider.write_bytes(b"\0libcublas.so.13\0libnvinfer_plugin.so.11\0libnvinfer.so.11\0libnvonnxparser.so.11\0")
    monkeypatch.setattr(tensorrt, "_PROVIDER_LIBRARY", provider)
    tensorrt._library.cache_clear()
    try:
        assert (tensorrt._library(), tensorrt._major()) == ("libnvinfer.so.11", 11)
    finally:
        tensorrt._library.cache_clear()


def test_the_locked_release_is_the_one_that_was_read() -> None:
    lock = Path("deploy/image/requirements-gpu.txt").read_text()
    assert re.findall(r"^onnxruntime-gpu==(\S+)", lock, re.MULTILINE) == re.findall(
        r"of onnxruntime-gpu (\S+), linked against libnvinfer.so.10", NAMES.read_text()
    ), "read the new provider: option names, and the library that it needs"


def test_cuda_graphs_are_refused() -> None:
    with pytest.raises(LoweringError, match="trt_cuda_graph_enable is not supported"):
        _options(replace(CONFIG, options={"trt_cuda_graph_enable": "1"}), None, None)
    _options(replace(CONFIG, options={"trt_cuda_graph_enable": "0"}), None, None)


def test_cache_paths() -> None:
    options = _options(CONFIG, None, Path("/cache/entry"))
    assert options["trt_engine_cache_path"] == options["trt_timing_cache_path"] == "/cache/entry"
    own = replace(CONFIG, options={"trt_engine_cache_path": "/mine"})
    assert _options(own, None, Path("/cache/entry"))["trt_engine_cache_path"] == "/mine"


def test_profile_of_the_signature(digits: Path) -> None:
    options = _options(CONFIG, read_signature(digits / "1" / "model.onnx"), None)
    assert options["device_id"] == "1"
    assert options["trt_profile_min_shapes"] == "INPUT_0:1x1x32x32"
    assert options["trt_profile_opt_shapes"] == options["trt_profile_max_shapes"] == "INPUT_0:16x1x32x32"


def test_unbounded_sizes(tmp_path: Path) -> None:
    folder = zoo.add(tmp_path, "m", zoo.identity(("batch", "n"), 1))
    signature = read_signature(folder / "model.onnx")
    with pytest.raises(LoweringError, match=r"has none for n.*trt_profile_min_shapes"):
        _options(CONFIG, signature, None)
    bounded = replace(CONFIG, options={"trt_profile_min_shapes": "x:1x1"})
    assert _options(bounded, signature, None)["trt_profile_min_shapes"] == "x:1x1"


class TestProbe:
    def test_missing_provider(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CPUExecutionProvider"])
        assert "pip install 'graphkiln[gpu]'" in TensorRtEngine().probe(Device.gpu(0)).reason

    def test_missing_libraries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: [PROVIDER])
        monkeypatch.setattr(loading, "gpu", lambda _: Gpu(name="g", compute_capability="9.0", driver="1"))
        support = TensorRtEngine().probe(Device.gpu(0))
        if not support.ok:
            assert "libnvinfer.so.10" in support.reason
            assert "pip install 'tensorrt>=10,<11'" in support.reason
        use(monkeypatch, 11)
        monkeypatch.setattr(tensorrt, "installed_version", lambda _: "10.13.0")
        if not (support := TensorRtEngine().probe(Device.gpu(0))).ok:
            assert "libnvinfer.so.11" in support.reason
            assert "tensorrt 10.13.0 is installed (pip install 'tensorrt>=11,<12'" in support.reason


class TestIdentity:
    @pytest.fixture(autouse=True)
    def _version(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tensorrt, "_version", lambda: "101300")

    def test_identity_is_stable(self) -> None:
        assert TensorRtEngine().identity(replace(CONFIG, precision=Precision.FP16)) == {
            "onnxruntime": onnxruntime.__version__,
            "tensorrt": "101300",
            "options": "[('device_id', '1'), ('trt_fp16_enable', '1'), ('trt_int8_enable', '0')]",
            "largest batch": "16",
        }


class TestBuild:
    @pytest.fixture
    def built(self, monkeypatch: pytest.MonkeyPatch) -> list[tuple[tuple[object, ...], dict[str, object]]]:
        calls: list[tuple[tuple[object, ...], dict[str, object]]] = []

        def record(*positional: object, **named: object) -> SimpleNamespace:
            calls.append((positional, named))
            return SimpleNamespace(notes=())

        monkeypatch.setattr(tensorrt, "OnnxRuntimeSession", record)
        return calls

    def test_providers(self, digits: Path, built: list[tuple[tuple[object, ...], dict[str, object]]]) -> None:
        config = replace(CONFIG, options={"trt_max_workspace_size": "7"})
        TensorRtEngine().build(digits / "1" / "model.onnx", config, Path("/cache"))
        ((graph, _, providers_), named) = built[0]
        assert graph == digits / "1" / "model.onnx"
        (first, options), (second, cuda) = providers_
        assert (first, second) == (PROVIDER, "CUDAExecutionProvider")
        assert options["trt_max_workspace_size"] == "7"
        assert options["trt_engine_cache_path"] == "/cache"
        assert cuda == {"device_id": "1", "use_tf32": "0"}, "TensorRT's options are not CUDA's"
        assert named["fused_products"] == {Precision.FP32: 5}

    def test_fused_products(self, digits: Path, built: list[tuple[tuple[object, ...], dict[str, object]]]) -> None:
        TensorRtEngine().build(digits / "1" / "model.onnx", replace(CONFIG, precision=Precision.FP16))
        assert built[0][1]["fused_products"] == {Precision.FP16: 5}


def test_identity_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensorrt, "_library", lambda: "libnonesuch.so.1")
    assert TensorRtEngine().identity(CONFIG)["tensorrt"] == "not installed"
