"""TensorRT's options, as far as they can be seen without a GPU: names, profiles, the error of a machine without it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnxruntime
import pytest
import zoo

from graphkiln_backend.engines import tensorrt
from graphkiln_backend.engines.base import SessionConfig
from graphkiln_backend.engines.hardware import Gpu
from graphkiln_backend.engines.onnxruntime import loading
from graphkiln_backend.engines.tensorrt import PROVIDER, TensorRtEngine, _options
from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.settings import TENSORRT_KEYS
from graphkiln_backend.repository.onnx_file import read_signature

CONFIG = SessionConfig(engine="tensorrt", device=Device.gpu(1), threads=1, spin=False, reason="test", largest_batch=16)
NAMES = Path(__file__).with_name("tensorrt_options.txt")


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
        monkeypatch.setattr(
            tensorrt, "OnnxRuntimeSession", lambda *positional, **named: calls.append((positional, named))
        )
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
    monkeypatch.setattr(tensorrt, "_LIBRARY", "libnonesuch.so.1")
    assert TensorRtEngine().identity(CONFIG)["tensorrt"] == "not installed"
