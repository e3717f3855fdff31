"""What is spread over devices by the benchmarks: a large product, a convolution net, two transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import onnx_ir
from inputs import CACHE
from precision_models import export_once, synthetic_feeds

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.repository.onnx_file import read_signature

WIDTH, HIDDEN = 2048, 8192


def large_product() -> Path:
    """The graph of one MLP of a large transformer, `[batch, 2048]`, its hidden layer 8192 wide; 128 MiB of weights."""
    path = CACHE / "large_product.onnx"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        path.write_bytes(onnx_ir.to_proto(_mlp()).SerializeToString())
    return path


def _mlp() -> onnx_ir.Model:
    random = np.random.default_rng(0)
    sizes = {"w1": (WIDTH, HIDDEN), "w2": (HIDDEN, WIDTH)}
    weights = [
        onnx_ir.Value(
            name=name,
            const_value=onnx_ir.tensor((random.normal(size=size) / size[0] ** 0.5).astype(np.float32), name=name),
        )
        for name, size in sizes.items()
    ]
    shape, kind = onnx_ir.Shape(["batch", WIDTH]), onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    x = onnx_ir.Value(name="x", shape=shape, type=kind)
    first = onnx_ir.node("MatMul", [x, weights[0]], name="first")
    relu = onnx_ir.node("Relu", [first.outputs[0]], name="relu")
    last = onnx_ir.node("MatMul", [relu.outputs[0], weights[1]], name="last")
    first.outputs[0].name, relu.outputs[0].name = "h", "r"
    y = last.outputs[0]
    y.name, y.shape, y.type = "y", shape, kind
    graph = onnx_ir.Graph(
        [x], [y], nodes=[first, relu, last], initializers=weights, opset_imports={"": 18}, name="large_product"
    )
    return onnx_ir.Model(graph, ir_version=9)


GRAPHS: dict[str, Callable[[], Path]] = {
    "large product": large_product,
    "resnet50": partial(export_once, "resnet50"),
    "vit_b_16": partial(export_once, "vit_b_16"),
    "bert_base": partial(export_once, "bert_base"),
}
"""Name -> makes its graph where it is not there yet."""


def synthetic_rows(graph: Path, rows: int) -> dict[str, AnyArray]:
    """Images or tokens; for the product alone, normal numbers.

    Args:
        graph: One of these.
        rows: How many.
    """
    signature, random = read_signature(graph), np.random.default_rng(1)
    if any(len(spec.shape) == 2 and spec.dtype is DType.FP32 for spec in signature.inputs):
        return {"x": random.normal(size=(rows, WIDTH)).astype(np.float32)}
    return synthetic_feeds(signature, rows, random)
