"""Every key of an unmodified repository's configuration: honored, or refused with a reason."""

from __future__ import annotations

import json
from typing import Any

import pytest
from lowered import cpu

from graphkiln_backend.engines.base import SessionTuning
from graphkiln_backend.engines.onnxruntime.session import session_options
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.plan import plan
from graphkiln_backend.lowering.setting_values import Choice
from graphkiln_backend.lowering.settings import Override, Settings, parse_override
from graphkiln_backend.repository.model_config import ModelConfig


def config(parameters: dict[str, str] | None = None, **optimization: Any) -> dict[str, Any]:
    return {
        "parameters": {name: {"string_value": value} for name, value in (parameters or {}).items()},
        "optimization": optimization,
    }


def read(document: dict[str, Any], *overrides: Override, gpu: bool = False) -> Settings:
    config = ModelConfig.from_json(json.dumps(document), has_gpu=gpu)
    return Settings.from_config(config, Device.gpu() if gpu else CPU, overrides)


def test_an_empty_configuration_asks_for_nothing() -> None:
    assert read({}) == Settings()


@pytest.mark.parametrize(
    ("key", "value", "field", "expected"),
    [
        ("execution_mode", "1", "parallel", True),
        ("execution_mode", "0", "parallel", False),
        ("inter_op_thread_count", "3", "inter_threads", 3),
        ("enable_mem_arena", "0", "memory_arena", False),
        ("enable_mem_pattern", "0", "memory_pattern", False),
        ("memory.enable_memory_arena_shrinkage", "cpu:0", "arena_shrinkage", "cpu:0"),
        ("session.dynamic_block_base", "4", "config_entries", {"session.dynamic_block_base": "4"}),
    ],
)
def test_session_keys(key: str, value: str, field: str, expected: Any) -> None:
    assert getattr(read(config({key: value})).tuning, field) == expected


def test_the_number_of_threads() -> None:
    assert read(config({"intra_op_thread_count": "5"})).threads == 5


@pytest.mark.parametrize(("level", "expected"), [(0, "all"), (-1, "basic"), (1, "extended"), (2, "off")])
def test_graph_levels(level: int, expected: str) -> None:
    assert read(config(graph={"level": level})).tuning.graph_level == expected


def test_our_own_keys() -> None:
    asked = {"engine": "openvino", "precision": "bf16", "threads": "3", "streams": "2", "self_test": "off"}
    settings = read(config({**asked, "fallback": "openvino:fp32, onnxruntime"}))
    assert (settings.engine, settings.precision, settings.threads, settings.streams) == ("openvino", "bf16", 3, 2)
    assert not settings.self_test
    assert settings.fallback == (Choice(engine="openvino", precision=Precision.FP32), Choice(engine="onnxruntime"))
    assert settings.origins["precision"] == "parameters.precision"


def test_what_only_a_gpu_has() -> None:
    settings = read(config({"layout": "nhwc", "conv_search": "heuristic"}), gpu=True)
    assert (settings.layout, settings.conv_search) == ("nhwc", "heuristic")


@pytest.mark.parametrize(("number", "search"), [("0", "exhaustive"), ("1", "heuristic"), ("2", "default")])
def test_the_convolution_search_of_the_c_backend(number: str, search: str) -> None:
    assert read(config({"cudnn_conv_algo_search": number}), gpu=True).conv_search == search
    on_cpu = read(config({"cudnn_conv_algo_search": number}))
    assert on_cpu.conv_search == ""
    assert "which has no cuDNN" in on_cpu.rejected[0]


@pytest.mark.parametrize(
    ("xrt", "engine"), [("tensorrt", "tensorrt"), ("openvino", "openvino"), ("oneflow", "onnxruntime")]
)
def test_the_xrt_parameter_of_oneflow_serving(xrt: str, engine: str) -> None:
    settings = read(config({"xrt": xrt}))
    assert (settings.engine, settings.origins["engine"]) == (engine, "parameters.xrt")


def accelerators(kind: str, name: str, parameters: dict[str, str] | None = None, **options: str) -> dict[str, Any]:
    block = {f"{kind}_execution_accelerator": [{"name": name, "parameters": options}]}
    return config(parameters, execution_accelerators=block)


def test_accelerators() -> None:
    tensorrt = read(accelerators("gpu", "tensorrt", precision_mode="FP16", trt_engine_cache_enable="1"), gpu=True)
    assert (tensorrt.engine, tensorrt.precision) == ("tensorrt", "fp16")
    assert tensorrt.options == {"tensorrt": {"trt_engine_cache_enable": "1"}}
    openvino = read(accelerators("cpu", "openvino", num_streams="2", num_of_threads="4", precision="ACCURACY"))
    assert (openvino.engine, openvino.precision, openvino.streams, openvino.threads) == ("openvino", None, 2, 4)
    cuda = read(accelerators("gpu", "cuda", {"gpu_mem_limit": "5"}, anything="passes"), gpu=True)
    assert cuda.engine == "onnxruntime"
    assert cuda.options == {"onnxruntime": {"anything": "passes", "gpu_mem_limit": "5"}}


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (config({"intra_op_threads": "2"}), "unknown key 'intra_op_threads' in parameters (did you mean"),
        (config({"precison": "bf16"}), "unknown key 'precison' in parameters (did you mean 'precision'?)"),
        (
            config({"precision": "bfloat16"}),
            "parameters.precision must be fp32, tf32, fp16, bf16, int8, got 'bfloat16'",
        ),
        (config({"self_test": "no"}), "parameters.self_test must be on or off, got 'no'"),
        (config({"fallback": "openvino:int4"}), "parameters.fallback must be ENGINE or ENGINE:PRECISION"),
        (config({"layout": "nhwc"}), "parameters.layout nhwc is for GPUs"),
        (config({"layout": "chwn"}), "parameters.layout must be nchw, nhwc, got 'chwn'"),
        (config({"conv_search": "exhaustive"}), "parameters.conv_search is for GPUs"),
        (config({"streams": "-1"}), "parameters.streams must be a whole number"),
        (config({"execution_mode": "parallel"}), "parameters.execution_mode must be 0 or 1, got 'parallel'"),
        (config({"intra_op_thread_count": "-1"}), "parameters.intra_op_thread_count must be a whole number"),
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
def test_what_is_refused(document: dict[str, Any], words: str) -> None:
    with pytest.raises(RepositoryError) as caught:
        read(document)
    assert words in str(caught.value)


def test_the_options_reach_onnx_runtime() -> None:
    parameters = {"execution_mode": "1", "inter_op_thread_count": "3", "intra_op_thread_count": "2", "session.x": "y"}
    settings = read(config({**parameters, "enable_mem_arena": "0", "enable_mem_pattern": "0"}, graph={"level": 2}))
    options = session_options(plan(settings, cpu(8)).configs[0])
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 3)
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    assert options.execution_mode.name == "ORT_PARALLEL"
    assert options.graph_optimization_level.name == "ORT_DISABLE_ALL"
    assert options.get_session_config_entry("session.x") == "y"
    assert settings.tuning != SessionTuning()


class TestPrecedence:
    ENABLE = Override("engine", "tensorrt", "--enable-tensorrt")
    SET = Override("engine", "onnxruntime", "--set")

    def test_the_order(self) -> None:
        document = accelerators("cpu", "openvino", {"xrt": "oneflow", "engine": "auto"})
        flags = [self.SET, self.ENABLE]
        seen = [read(document, *flags[start:]).engine for start in range(3)]
        assert seen == ["onnxruntime", "tensorrt", "auto"]
        del document["parameters"]["engine"]
        assert read(document).origins["engine"] == "parameters.xrt"
        del document["parameters"]["xrt"]
        assert read(document).origins["engine"] == "execution accelerator openvino"

    def test_what_lost_is_told(self) -> None:
        rejected = read(accelerators("cpu", "openvino"), self.SET, self.ENABLE).rejected
        assert rejected == (
            "engine tensorrt of --enable-tensorrt: --set requests onnxruntime",
            "engine openvino of execution accelerator openvino: --set requests onnxruntime",
        )

    def test_options_of_one_engine_are_not_handed_to_another(self) -> None:
        written = accelerators("cpu", "openvino", num_streams="2", cache_dir="x")
        same = read(written, Override("engine", "openvino", "--enable-openvino"))
        assert (same.streams, same.options) == (2, {"openvino": {"cache_dir": "x"}})
        other = read(written, self.ENABLE)
        assert (other.streams, other.options) == (0, {"openvino": {"cache_dir": "x"}})  # for openvino as a fallback
        assert "streams 2 of execution accelerator openvino: another engine is requested" in other.rejected

    def test_the_command_line_wins_in_every_vocabulary(self) -> None:
        written = config({"threads": "8", "engine": "onnxruntime", "conv_search": "default"})
        flags = [Override("intra_op_thread_count", "2", "--set"), Override("xrt", "openvino", "--set")]
        settings = read(written, *flags, Override("cudnn_conv_algo_search", "0", "--set"), gpu=True)
        assert (settings.threads, settings.engine, settings.conv_search) == (2, "openvino", "exhaustive")

    def test_auto_takes_the_settings_of_a_block(self) -> None:
        auto = read(accelerators("gpu", "tensorrt", {"engine": "auto"}, precision_mode="FP16"), gpu=True)
        assert (auto.engine, auto.precision) == ("auto", "fp16")

    def test_nothing_is_dropped_in_silence(self) -> None:
        block = [{"name": "tensorrt"}, {"name": "cuda"}]
        two = read(config(execution_accelerators={"gpu_execution_accelerator": block}), gpu=True)
        assert "execution accelerator cuda: one stands before it" in two.rejected
        on_cpu = read(config({"gpu_mem_limit": "5"}))
        assert "gpu_mem_limit 5 of parameters.gpu_mem_limit: the instance runs on the CPU" in on_cpu.rejected
        openvino = read(config({"engine": "openvino", "execution_mode": "1"}))
        assert "execution_mode 1 of parameters.execution_mode: OpenVINO has no use for it" in openvino.rejected
        entry = read(config({"engine": "openvino", "session.x": "y"}))
        assert "session.x y of parameters.session.x: OpenVINO has no use for it" in entry.rejected

    def test_tensorrts_own_switch_means_the_precision(self) -> None:
        settings = read(accelerators("gpu", "tensorrt", trt_fp16_enable="1"), gpu=True)
        assert (settings.precision, settings.options) == ("fp16", {})

    def test_the_set_flag(self) -> None:
        assert parse_override("precision=bf16") == ("precision", "bf16", "--set")
        with pytest.raises(RepositoryError, match="a value is missing"):
            parse_override("precision")
        with pytest.raises(RepositoryError, match="did you mean 'precision'"):
            parse_override("precison=bf16")
        with pytest.raises(RepositoryError, match="--set must be"):
            read({}, Override("precision", "bf17", "--set"))
