"""Makes the sparse constants of a file dense, which onnx_ir (0.2) drops or refuses; ONNX Runtime does so itself."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx

Part = onnx.GraphProto | onnx.FunctionProto


def make_dense(model: onnx.ModelProto) -> None:
    """Replaces every sparse initializer and sparse `Constant`, also those in subgraphs and functions, in place."""
    for part in _parts(model):
        if isinstance(part, onnx.GraphProto):
            part.initializer.extend(_dense(sparse) for sparse in part.sparse_initializer)
            del part.sparse_initializer[:]
        for node in part.node:
            for attribute in node.attribute:
                if node.op_type == "Constant" and attribute.name == "sparse_value":
                    tensor = _dense(attribute.sparse_tensor)
                    attribute.CopyFrom(onnx.helper.make_attribute("value", tensor))


def _parts(model: onnx.ModelProto) -> Iterator[Part]:
    parts: list[Part] = [model.graph, *model.functions]
    for part in parts:  # and the graphs inside of it
        yield part
        for attribute in (attribute for node in part.node for attribute in node.attribute):
            parts += [attribute.g, *attribute.graphs] if attribute.HasField("g") else attribute.graphs


def _dense(sparse: onnx.SparseTensorProto) -> onnx.TensorProto:
    values = onnx.numpy_helper.to_array(sparse.values)
    indices = onnx.numpy_helper.to_array(sparse.indices)
    dense = np.zeros(tuple(sparse.dims), values.dtype)
    if indices.ndim == 1:
        dense.reshape(-1)[indices] = values
    else:
        dense[tuple(indices.T)] = values
    return onnx.numpy_helper.from_array(dense, sparse.values.name)
