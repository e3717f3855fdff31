"""Small graphs from ONNX's text format, and their outputs by ONNX's reference implementation."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir
from onnx.reference import ReferenceEvaluator

from graphkiln_backend.graph.dtypes import AnyArray


def graph(text: str, *, opset: int = 18, **weights: Any) -> onnx_ir.Model:
    """Parse a graph and infer its shapes; weights become initializers, nodes get names."""
    model = onnx.parser.parse_model(f'<ir_version: 9, opset_import: ["": {opset}]> g {text}')
    for name, array in weights.items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.asarray(array), name))
    for number, node in enumerate(model.graph.node):
        node.name = node.name or f"node{number}"
    return onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model, strict_mode=True, data_prop=True))


def compute(model: onnx_ir.Model, **feeds: AnyArray) -> dict[str, AnyArray]:
    """Outputs by name, from ONNX's reference implementation."""
    names = [str(value.name) for value in model.graph.outputs]
    return dict(zip(names, ReferenceEvaluator(onnx_ir.to_proto(model)).run(None, feeds), strict=True))


def operators(model: onnx_ir.Model) -> list[str]:
    """Types of all nodes, in order."""
    return [node.op_type for node in model.graph]


def draw(*shape: int, seed: int = 0) -> AnyArray:
    """Seeded standard normal fp32 numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def ints(*numbers: int) -> AnyArray:
    """INT64 `[len(numbers)]`."""
    return np.array(numbers, np.int64)
