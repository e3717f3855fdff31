"""What a profile of ONNX Runtime says: which kernels ran, where, on which element types."""

from __future__ import annotations

from graphkiln_backend.engines.onnxruntime.profile import summarize_profile
from graphkiln_backend.engines.onnxruntime.providers import CPU, CUDA


def kernel(name: str, operator: str, provider: str) -> dict[str, object]:
    arguments = {"op_name": operator, "provider": provider, "input_type_shape": [{"float": [1]}]}
    return {"cat": "Node", "name": f"{name}_kernel_time", "dur": 1, "args": arguments}


def test_products_on_the_cpu_are_told_from_shapes_on_the_cpu() -> None:
    kernels = [kernel("conv", "Conv", CUDA), kernel("shape", "Gather", CPU), kernel("fc", "MatMul", CPU)]
    found = summarize_profile(kernels, CUDA, {})
    assert found.nodes == {CUDA: 1, CPU: 2}
    assert found.products == {"fp32": 2}
    assert found.elsewhere == ("fc",)


def test_products_inside_a_fused_kernel_are_those_of_the_graph_that_ran_nowhere_else() -> None:
    kernels = [kernel("TRTKernel_graph_0", "TRTKernel_graph_0", "TensorrtExecutionProvider"), kernel("a", "Conv", CUDA)]
    found = summarize_profile(kernels, "TensorrtExecutionProvider", {"fp32": 5})
    assert found.products == {"fp32": 4}
    assert found.elsewhere == ("a",)
    nothing = summarize_profile(kernels[1:], "TensorrtExecutionProvider", {"fp16": 5})
    assert nothing.products == {"fp32": 1}
