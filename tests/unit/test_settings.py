"""Every key of an unmodified repository's configuration: honoured, or refused with a reason."""

from __future__ import annotations

from typing import Any

import pytest

from graphkiln.engines.base import SessionTuning
from graphkiln.engines.onnxruntime import _options
from graphkiln.graph.errors import RepositoryError
from graphkiln.lowering.plan import plan
from graphkiln.lowering.settings import Settings


def config(parameters: dict[str, str] | None = None, **optimization: Any) -> dict[str, Any]:
    return {
        "parameters": {name: {"string_value": value} for name, value in (parameters or {}).items()},
        "optimization": optimization,
    }


def read(document: dict[str, Any], *, gpu: bool = False) -> Settings:
    return Settings.from_config(document, gpu=gpu)


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


@pytest.mark.parametrize(
    ("xrt", "engine"), [("tensorrt", "tensorrt"), ("openvino", "openvino"), ("oneflow", "onnxruntime")]
)
def test_the_xrt_parameter_of_oneflow_serving(xrt: str, engine: str) -> None:
    settings = read(config({"xrt": xrt}))
    assert (settings.engine, settings.engine_from) == (engine, "parameters.xrt")


def accelerators(kind: str, name: str, **parameters: str) -> dict[str, Any]:
    return config(execution_accelerators={f"{kind}_execution_accelerator": [{"name": name, "parameters": parameters}]})


def test_accelerators() -> None:
    tensorrt = read(accelerators("gpu", "tensorrt", precision_mode="FP16", trt_engine_cache_enable="1"), gpu=True)
    assert tensorrt.engine == "tensorrt"
    assert tensorrt.accelerator == {"precision_mode": "FP16", "trt_engine_cache_enable": "1"}
    assert read(accelerators("cpu", "openvino", num_streams="2")).engine == "openvino"
    assert read(accelerators("gpu", "cuda", anything="passes"), gpu=True).engine == "onnxruntime"


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (config({"intra_op_threads": "2"}), "unknown key 'intra_op_threads' in parameters (did you mean"),
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
    options = _options(plan(settings, device="cpu", cores=8, instances=1).steps[0])
    assert (options.intra_op_num_threads, options.inter_op_num_threads) == (2, 3)
    assert (options.enable_cpu_mem_arena, options.enable_mem_pattern) == (False, False)
    assert options.execution_mode.name == "ORT_PARALLEL"
    assert options.graph_optimization_level.name == "ORT_DISABLE_ALL"
    assert options.get_session_config_entry("session.x") == "y"
    assert settings.tuning != SessionTuning()


def test_the_command_line_goes_first_and_takes_over_only_its_own_engines_options() -> None:
    written = accelerators("cpu", "openvino", num_streams="2")
    assert Settings.from_config(written, gpu=False, asked="openvino").accelerator == {"num_streams": "2"}
    other = Settings.from_config(written, gpu=False, asked="tensorrt")
    assert (other.engine, other.engine_from, other.accelerator) == ("tensorrt", "--enable-tensorrt", {})
