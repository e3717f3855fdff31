"""What a profile of ONNX Runtime says: which kernels ran, where, on which element types."""

from __future__ import annotations

import pytest

from graphkiln_backend.engines.onnxruntime.loading import CPU, CUDA
from graphkiln_backend.engines.onnxruntime.session import seconds_of_nodes, summarize_profile
from graphkiln_backend.graph.precision import Precision


def kernel(
    name: str, operator: str, provider: str, types: tuple[str, ...] = ("float",), microseconds: int = 1
) -> dict[str, object]:
    arguments = {"op_name": operator, "provider": provider, "input_type_shape": [{name: [1]} for name in types]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": microseconds, "args": arguments}


def test_products_inside_a_fused_kernel_are_those_of_the_graph_that_ran_nowhere_else() -> None:
    kernels = [kernel("TRTKernel_graph_0", "TRTKernel_graph_0", "TensorrtExecutionProvider"), kernel("a", "Conv", CUDA)]
    found = summarize_profile(kernels, "TensorrtExecutionProvider", {"fp32": 5})
    assert found.products == {"fp32": 4}
    assert found.elsewhere == ("a",)
    nothing = summarize_profile(kernels[1:], "TensorrtExecutionProvider", {"fp16": 5})
    assert nothing.products == {"fp32": 1}


@pytest.mark.parametrize(
    ("types", "expected"),
    [
        (("float", "float"), Precision.FP32),
        (("float16", "float"), Precision.FP16),
        (("bfloat16", "float"), Precision.BF16),
        (("float", "uint8", "int8", "float"), Precision.INT8),
        (("int8", "float16"), Precision.INT8),
        (("double",), "fp64"),
        (("double", "float"), Precision.FP32),
        (("int64",), "integer"),
        (("bool", "string"), "integer"),
        ((), "integer"),
    ],
)
def test_a_kernel_computes_in_the_narrowest_type_that_it_reads(types: tuple[str, ...], expected: object) -> None:
    found = summarize_profile([kernel("fc", "MatMul", CPU, types)], CPU, {})
    assert found.products == {expected: 1}
    assert found.precision == expected


def test_the_precision_is_that_of_most_of_the_time_not_of_most_of_the_kernels() -> None:
    kernels = [
        kernel("a", "Relu", CPU, ("float",), 5),
        kernel("b", "Relu", CPU, ("float",), 5),
        kernel("c", "MatMul", CPU, ("float16",), 500),
    ]
    assert summarize_profile(kernels, CPU, {}).precision is Precision.FP16


def test_a_node_takes_the_median_of_its_runs() -> None:
    """The first run is a cold one; what is no kernel counts for nothing."""
    runs = [kernel("a", "Conv", CPU, microseconds=taken) for taken in (900, 10, 12)]
    other = [kernel("b", "Relu", CPU, microseconds=0), {"cat": "Session", "name": "model_run", "dur": 999}]
    assert seconds_of_nodes([*runs, *other]) == {"a": pytest.approx(12e-6), "b": 0.0}
