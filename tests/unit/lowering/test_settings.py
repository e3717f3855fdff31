"""Settings: each key of a configuration is honored, or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lowered import cpu

from graphkiln_backend.engines.base import SessionTuning
from graphkiln_backend.engines.onnxruntime.loading import session_options
from graphkiln_backend.graph.device import CPU, Device, Parallelism
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.plan import plan
from graphkiln_backend.lowering.settings import SESSION_KEYS, Choice, Override, Settings, parse_override
from graphkiln_backend.repository.config import parse_json
from graphkiln_backend.repository.model_config import ModelConfig


def config(parameters: dict[str, str] | None = None, **optimization: Any) -> dict[str, Any]:
    return {
        "parameters": {name: {"string_value": value} for name, value in (parameters or {}).items()},
        "optimization": optimization,
    }


def read(document: dict[str, Any], *overrides: Override, gpu: bool = False) -> Settings:
    config = ModelConfig.from_protobuf(parse_json(json.dumps(document)), has_gpu=gpu)
    return Settings.from_config(config, Device.gpu() if gpu else CPU, overrides)


class TestOpenVinoBackend:
    """Triton's C++ `openvino` backend."""

    def read(self, **parameters: str) -> Settings:
        return read({"backend": "openvino", **config(parameters)})

    def test_its_models_run_in_openvino(self) -> None:
        assert self.read().engine == "openvino"
        assert self.read().origins == {"engine": "backend openvino"}
        assert self.read(engine="onnxruntime").engine == "onnxruntime"

    def test_its_keys(self) -> None:
        found = self.read(INFERENCE_NUM_THREADS="3", NUM_STREAMS="2", HINT_BF16="YES", TARGET_DEVICE="CPU")
        assert (found.threads, found.streams, found.precision, found.rejected) == (3, 2, Precision.BF16, ())

    @pytest.mark.parametrize(("word", "precision"), [("f32", Precision.FP32), ("FP16", Precision.FP16), ("", None)])
    def test_precision_hint(self, word: str, precision: Precision | None) -> None:
        assert self.read(INFERENCE_PRECISION_HINT=word).precision is precision

    def test_keys_without_effect_are_named(self) -> None:
        found = self.read(NUM_STREAMS="AUTO", PERFORMANCE_HINT="LATENCY", SKIP_OV_DYNAMIC_BATCHSIZE="YES")
        assert found.streams == 0
        assert [line.partition(" ")[0] for line in found.rejected] == [
            "NUM_STREAMS",
            "PERFORMANCE_HINT",
            "SKIP_OV_DYNAMIC_BATCHSIZE",
        ]

    @pytest.mark.parametrize(
        ("parameters", "message"),
        [
            ({"TARGET_DEVICE": "GPU"}, "TARGET_DEVICE must be CPU"),
            ({"RESHAPE_IO_LAYERS": "YES"}, "RESHAPE_IO_LAYERS cannot be met"),
            ({"CPU_EXTENSION_PATH": "ops.so"}, "CPU_EXTENSION_PATH cannot be met"),
            ({"NUM_STREAMS": "many"}, "must be a whole number"),
            ({"NUM_STREAM": "1"}, "did you mean 'NUM_STREAMS'"),
        ],
    )
    def test_refused_keys(self, parameters: dict[str, str], message: str) -> None:
        with pytest.raises(RepositoryError, match=message):
            self.read(**parameters)

    def test_its_keys_are_unknown_elsewhere(self) -> None:
        with pytest.raises(RepositoryError, match="unknown key 'NUM_STREAMS'"):
            read(config({"NUM_STREAMS": "1"}))


@pytest.mark.parametrize(
    ("number", "search"),
    [("0", "exhaustive"), ("1", "heuristic"), ("2", "default"), ("EXHAUSTIVE", "exhaustive")],
)
def test_convolution_search_of_the_cpp_backend(number: str, search: str) -> None:
    assert read(config({"cudnn_conv_algo_search": number}), gpu=True).conv_search == search
    on_cpu = read(config({"cudnn_conv_algo_search": number}))
    assert on_cpu.conv_search == ""
    assert "which has no cuDNN" in on_cpu.rejected[0]


@pytest.mark.parametrize(
    ("xrt", "engine"), [("tensorrt", "tensorrt"), ("openvino", "openvino"), ("oneflow", "onnxruntime")]
)
def test_xrt_parameter_of_oneflow_serving(xrt: str, engine: str) -> None:
    settings = read(config({"xrt": xrt}))
    assert (settings.engine, settings.origins["engine"]) == (engine, "parameters.xrt")


def test_seat() -> None:
    assert read(config()).seat == read(config({"seat": ""})).seat == "auto"
    settings = read(config({"seat": "native"}), Override("seat", "python", "--set"))
    assert (settings.seat, settings.origins["seat"]) == ("python", "--set")
    with pytest.raises(RepositoryError, match=r"parameters\.seat must be .*, got 'pyton'") as caught:
        read(config({"seat": "pyton"}))
    assert caught.value.hint == "did you mean 'python'?"


def accelerators(kind: str, name: str, parameters: dict[str, str] | None = None, **options: str) -> dict[str, Any]:
    block = {f"{kind}_execution_accelerator": [{"name": name, "parameters": options}]}
    return config(parameters, execution_accelerators=block)


def test_accelerators() -> None:
    tensorrt = read(accelerators("gpu", "tensorrt", precision_mode="FP16", trt_engine_cache_enable="1"), gpu=True)
    assert (tensorrt.engine, tensorrt.precision) == ("tensorrt", "fp16")
    assert tensorrt.options == {"tensorrt": {"trt_engine_cache_enable": "1", "precision_mode": "fp16"}}
    openvino = read(accelerators("cpu", "openvino", num_streams="2", num_of_threads="4", precision="ACCURACY"))
    assert (openvino.engine, openvino.precision, openvino.streams, openvino.threads) == ("openvino", None, 2, 4)
    cuda = read(accelerators("gpu", "cuda", {"gpu_mem_limit": "5"}, anything="passes"), gpu=True)
    assert cuda.engine == "onnxruntime"
    assert cuda.options == {"onnxruntime": {"anything": "passes", "gpu_mem_limit": "5"}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (config({"precison": "bf16"}), "unknown key 'precison' in parameters (did you mean 'precision'?)"),
        (
            config({"precision": "bfloat16"}),
            "parameters.precision must be fp32, tf32, fp16, bf16, int8, got 'bfloat16'",
        ),
        (config({"fallback": "openvino:int4"}), "parameters.fallback must be ENGINE or ENGINE:PRECISION"),
        (config({"layout": "nhwc"}), "parameters.layout nhwc is for GPUs"),
        (config({"layout": "chwn"}), "parameters.layout must be nchw, nhwc, got 'chwn'"),
        (config({"conv_search": "exhaustive"}), "parameters.conv_search is for GPUs"),
        (config({"execution_mode": "parallel"}), "parameters.execution_mode must be 0 or 1, got 'parallel'"),
        (config(graph={"level": 7}), "optimization.graph.level must be 0 (all)"),
        (config({"xrt": "tvm"}), "parameters.xrt must be tensorrt, openvino, oneflow, got 'tvm'"),
        (
            accelerators("gpu", "tensort"),
            "unknown key 'tensort' in gpu_execution_accelerator (did you mean 'tensorrt'?)",
        ),
        (accelerators("gpu", "tensorrt", trt_engine_cach="1"), "did you mean 'trt_engine_cache"),
        (accelerators("cpu", "openvino", streams="1"), "unknown key 'streams' in cpu_execution_accelerator openvino"),
        (accelerators("cpu", "openvino", precision="INT4"), "execution accelerator openvino, precision must be"),
        (accelerators("gpu", "tensorrt"), "but the instance runs on the CPU"),
    ],
)
def test_invalid_configurations(document: dict[str, Any], words: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        read(document)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("key", "text", "expected"),
    [
        ("threads", "0", 0),
        ("threads", "007", 7),
        ("precision", "", None),
        *(("precision", str(precision), precision) for precision in Precision),
        ("fallback", " , ,", ()),
        ("fallback", "theirs, openvino:", (Choice(engine="theirs"), Choice(engine="openvino"))),
        ("parallel", "", None),
        ("parallel", "data=2", Parallelism(data=2)),
        ("parallel", " pipeline = 2,tensor=4 ", Parallelism(pipeline=2, tensor=4)),
        ("parallel", "auto, memory=2GiB", Parallelism(auto=True, memory_bytes=2 << 30)),
        ("parallel", "pipeline=2, micro_batches=8", Parallelism(pipeline=2, micro_batches=8)),
        ("providers", " , ", ()),
        ("providers", "OpenVINO, WebGpu:gpu:1,Acme:npu, CPU", ("OpenVINO", "WebGpu:gpu:1", "Acme:npu", "CPU")),
    ],
)
def test_values(key: str, text: str, expected: object) -> None:
    assert getattr(read(config({key: text})), key) == expected


@pytest.mark.parametrize(
    ("key", "texts", "expected"),
    [
        ("threads", ("", "-1", "1.5", " 2", "9" * 20, "two"), "a whole number, 0 for the default"),
        ("self_test", ("1", "ON"), "on or off"),
        ("enable_mem_arena", ("true", "2", ""), "0 or 1"),
        (
            "parallel",
            ("2", "data=0", "data=two", "data=1.5", "data=2, data=2", "pipelines=2", "memory=much", "=2", "data="),
            "auto or numbers such as data=2",
        ),
        ("parallel", ("auto, tensor=2", "auto, auto"), "either auto"),
        ("providers", ("CPU", "CPU, OpenVINO", "OpenVINO:x", "OpenVINO:cpu:1", "a b"), "a list of NAME or NAME:DEVICE"),
        ("parallel", ("micro_batches=2",), "with pipeline=2 or more where micro_batches is given"),
    ],
)
def test_malformed_values(key: str, texts: tuple[str, ...], expected: str) -> None:
    for text in texts:
        with pytest.raises(RepositoryError) as caught:
            read(config({key: text}))
        assert caught.value.message.startswith(f"parameters.{key} must be {expected}")
        assert caught.value.message.endswith(f"got '{text}'")


@given(st.lists(st.tuples(st.sampled_from(["engine", "fallback"]), st.sampled_from("xyz"), st.sampled_from("123"))))
def test_each_value_is_used_or_rejected(sources: list[tuple[str, str, str]]) -> None:
    settings = read({}, *(Override(*source) for source in sources))
    first = {key: value for key, value, _ in reversed(sources)}
    assert settings.engine == first.get("engine", "")
    for key, value, origin in sources:
        rejected = any(line.startswith(f"{key} {value} of {origin}: ") for line in settings.rejected)
        assert rejected == (first[key] != value)


def test_options_of_plugins() -> None:
    key = "ep.openvinoexecutionprovider.load_config"
    settings = read(config({"providers": "OpenVINO", key: "{}"}))
    assert settings.tuning.config_entries == {key: "{}"}
    assert read(config({key: "{}"})).rejected == (f"{key} {{}} of parameters.{key}: providers names no plugin",)
    with pytest.raises(RepositoryError, match=r"unknown key 'ep\.context_enable'"):
        read(config({"ep.context_enable": "1"}))


def test_options_of_onnx_runtime() -> None:
    parameters = {"execution_mode": "1", "inter_op_thread_count": "3", "intra_op_thread_count": "2", "session.x": "y"}
    settings = read(config({**parameters, "enable_mem_arena": "0", "enable_mem_pattern": "1"}, graph={"level": 2}))
    options = session_options(plan(settings, cpu(8)).configs[0])
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 3)
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, True)
    assert options.execution_mode.name == "ORT_PARALLEL"
    assert options.graph_optimization_level.name == "ORT_DISABLE_ALL"
    assert options.get_session_config_entry("session.x") == "y"
    assert settings.tuning != SessionTuning()


class TestPrecedence:
    ENABLE = Override("engine", "tensorrt", "--enable-tensorrt")
    SET = Override("engine", "onnxruntime", "--set")

    def test_order(self) -> None:
        document = accelerators("cpu", "openvino", {"xrt": "oneflow", "engine": "auto"})
        flags = [self.SET, self.ENABLE]
        seen = [read(document, *flags[start:]).engine for start in range(3)]
        assert seen == ["onnxruntime", "tensorrt", "auto"]
        del document["parameters"]["engine"]
        assert read(document).origins["engine"] == "parameters.xrt"
        del document["parameters"]["xrt"]
        assert read(document).origins["engine"] == "execution accelerator openvino"

    def test_overridden_values_are_listed(self) -> None:
        rejected = read(accelerators("cpu", "openvino"), self.SET, self.ENABLE).rejected
        assert rejected == (
            "engine tensorrt of --enable-tensorrt: --set requests onnxruntime",
            "engine openvino of execution accelerator openvino: --set requests onnxruntime",
        )

    def test_options_are_kept_per_engine(self) -> None:
        written = accelerators("cpu", "openvino", num_streams="2", cache_dir="x")
        same = read(written, Override("engine", "openvino", "--enable-openvino"))
        assert (same.streams, same.options) == (2, {"openvino": {"cache_dir": "x"}})
        other = read(written, self.ENABLE)
        assert (other.streams, other.options) == (0, {"openvino": {"cache_dir": "x"}})  # for openvino as a fallback
        assert "streams 2 of execution accelerator openvino: another engine is requested" in other.rejected

    def test_command_line_overrides_every_vocabulary(self) -> None:
        written = config({"threads": "8", "engine": "onnxruntime", "conv_search": "default"})
        flags = [Override("intra_op_thread_count", "2", "--set"), Override("xrt", "openvino", "--set")]
        settings = read(written, *flags, Override("cudnn_conv_algo_search", "0", "--set"), gpu=True)
        assert (settings.threads, settings.engine, settings.conv_search) == (2, "openvino", "exhaustive")


@pytest.mark.parametrize(
    ("text", "words", "hint"),
    [
        ("precision", "a value is missing", ""),
        ("precison=bf16", "unknown key", "did you mean 'precision'"),
        ("accept_images=true", "only be set in config", '{ key: "accept_images" value { string_value: "true" } }'),
        ("task={}", "describes a version", "graphkiln convert"),
        ("TRITON_SKIP_DLPACK=1", "from config.pbtxt", '{ key: "TRITON_SKIP_DLPACK" value { string_value: "1" } }'),
    ],
)
def test_set_flag_refuses(text: str, words: str, hint: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        parse_override(text)
    assert words in caught.value.message
    assert hint in caught.value.hint


def test_set_flag() -> None:
    assert parse_override("precision=bf16") == ("precision", "bf16", "--set")
    with pytest.raises(RepositoryError, match="--set must be"):
        read({}, Override("precision", "bf17", "--set"))


class TestAccelerators:
    def test_accelerators_of_another_device_are_validated_and_ignored(self) -> None:
        both = accelerators("gpu", "tensorrt")
        both["optimization"]["execution_accelerators"]["cpu_execution_accelerator"] = [{"name": "openvino"}]
        assert read(both, gpu=True).engine == "tensorrt"
        assert read(accelerators("cpu", "openvino"), gpu=True).engine == ""
        with pytest.raises(RepositoryError, match="unknown key 'openvine' in cpu_execution_accelerator"):
            read(accelerators("cpu", "openvine"), gpu=True)

    def test_missing_gpu_is_an_error(self) -> None:
        with pytest.raises(RepositoryError) as caught:
            read(accelerators("gpu", "cuda"))
        assert "gpu_execution_accelerator 'cuda' is requested" in caught.value.message
        assert "on a machine with a GPU" in caught.value.hint

    @pytest.mark.parametrize("key", ["trt_fp16_enable", "trt_bf16_enable"])
    @pytest.mark.parametrize(("value", "on"), [("1", True), ("True", True), ("no", False)])
    def test_precision_switches_of_tensorrt(self, key: str, value: str, on: bool) -> None:
        settings = read(accelerators("gpu", "tensorrt", **{key: value}), gpu=True)
        assert settings.precision == (Precision(key.split("_")[1]) if on else None)
        assert settings.options == ({"tensorrt": {"precision_mode": settings.precision}} if on else {})


class TestCpu:
    @pytest.mark.parametrize(
        "override", [Override("conv_search", "exhaustive", "--set"), Override("cudnn_conv_algo_search", "0", "--set")]
    )
    def test_convolution_search_on_the_command_line_is_refused(self, override: Override) -> None:
        """A repository of the C++ backend may contain it; a command line must not."""
        with pytest.raises(RepositoryError, match="--set is for GPUs, but the instance runs on the CPU"):
            read({}, override)


class TestOpenVino:
    def test_keys_of_onnx_runtime_are_rejected(self) -> None:
        keys = {name: "1" for name in SESSION_KEYS if name != "intra_op_thread_count"}
        rejected = read(config({"engine": "openvino", **keys, "session.x": "y"})).rejected
        assert {line.split()[0] for line in rejected} == {*keys, "session.x"}
