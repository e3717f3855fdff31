"""Graphs in OpenVINO IR, made by OpenVINO itself."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
from openvino import opset13

Dims = Sequence[int | str]


def save_ir(model: openvino.Model | onnx.ModelProto | Path, path: Path, *, compress: bool = False) -> Path:
    """Write a graph as `path` and its weights beside it.

    Args:
        model: The graph; ONNX is converted.
        path: `NAME.xml`; its folder is created.
        compress: Store the weights in fp16, which is OpenVINO's own default.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(model, onnx.ModelProto):
        source = path.with_suffix(".onnx")
        onnx.save(model, source)
        converted = openvino.convert_model(source)
        source.unlink()
    else:
        converted = openvino.convert_model(model) if isinstance(model, Path) else model
    openvino.save_model(converted, path, compress_to_fp16=compress)
    return path


def parameter(name: str, shape: Any, dtype: Any = np.float32) -> openvino.Node:
    """Make an input; dimensions as for `openvino.PartialShape`."""
    node = opset13.parameter(openvino.PartialShape(shape), dtype, name=name)
    node.output(0).set_names({name})
    return node


def graph(outputs: dict[str, openvino.Output], inputs: Sequence[openvino.Node]) -> openvino.Model:
    """Make a graph with named outputs."""
    for name, output in outputs.items():
        output.set_names({name})
    return openvino.Model([opset13.result(output) for output in outputs.values()], list(inputs), "graph")


def product(shape: Any = (-1, 3), *, columns: int = 4, dtype: Any = np.float32, scale: float = 1.0) -> openvino.Model:
    """`y = x @ w`, with weights that count up."""
    x = parameter("x", shape, dtype)
    weights = (np.arange(3 * columns, dtype=np.float32).reshape(3, columns) * scale).astype(np.float32)
    w = opset13.constant(weights) if dtype is np.float32 else opset13.convert(opset13.constant(weights), dtype)
    return graph({"y": opset13.matmul(x, w, transpose_a=False, transpose_b=False).output(0)}, [x])
