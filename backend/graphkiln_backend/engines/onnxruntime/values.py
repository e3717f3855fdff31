"""Tensors that ONNX Runtime's numpy binding gets wrong: text given as bytes, bf16, and those of any rank."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnxruntime

from graphkiln_backend.graph.arrays import as_text
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import SignatureError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.graph.signature import ANY_RANK, TensorSpec
from graphkiln_backend.repository.onnx_file import read_graph

if TYPE_CHECKING:
    import onnx
else:
    onnx = LazyModule("onnx")  # for text alone

_ONNX_BF16 = 16
"""Source: `onnx.TensorProto.BFLOAT16`."""


def decode_text(name: str, array: AnyArray) -> AnyArray:
    """Turns an array of bytes into one of `str`: the binding would take the bytes b'a' for the text "b'a'".

    Args:
        name: The input, for the error.
        array: Of any dtype; one that holds no bytes objects is returned as it is.

    Raises:
        SignatureError: An element is not UTF-8.
    """
    try:
        return as_text(array)
    except UnicodeDecodeError as error:
        raise SignatureError(
            f"input '{name}' holds text that cannot be read", expected="UTF-8", got=str(error)
        ) from error


def run_ort_values(
    session: onnxruntime.InferenceSession,
    outputs: Sequence[str],
    feeds: Mapping[str, AnyArray],
    options: onnxruntime.RunOptions,
) -> list[AnyArray]:
    """Runs a graph with bf16 inputs or outputs, which the numpy binding does not know.

    Returns:
        New arrays in the order of `outputs`; bf16 as `ml_dtypes.bfloat16`.
    """
    values = {name: _to_ort_value(array) for name, array in feeds.items()}
    return [_to_array(value) for value in session.run_with_ort_values(outputs, values, options)]


def _to_ort_value(array: AnyArray) -> onnxruntime.OrtValue:
    if array.dtype == object:
        return _text_value(array)
    if array.dtype != DType.BF16.numpy:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _ONNX_BF16)


def _text_value(array: AnyArray) -> onnxruntime.OrtValue:
    """Text beside bf16: the binding makes values of it only where a graph computes them, so a graph of it does."""
    text = onnx.TensorProto(
        data_type=onnx.TensorProto.STRING, dims=array.shape, string_data=[str(item).encode() for item in array.flat]
    )
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.STRING, array.shape)
    graph = onnx.helper.make_graph([onnx.helper.make_node("Constant", [], ["y"], value=text)], "text", [], [output])
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)], ir_version=8)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    (value,) = session.run_with_ort_values(["y"], {}, None)
    return value


def _to_array(value: onnxruntime.OrtValue) -> AnyArray:
    array: AnyArray
    if value.element_type() != _ONNX_BF16:
        array = value.numpy()
        return array
    array = np.empty(value.shape(), DType.BF16.numpy)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array


def ranked(inputs: tuple[TensorSpec, ...], graph_path: Path) -> tuple[TensorSpec, ...]:
    """Inputs as the graph has them: one that may have any number of dimensions is a scalar to ONNX Runtime."""
    if all(spec.shape for spec in inputs):
        return inputs
    stated = {value.name: value.type.tensor_type.HasField("shape") for value in read_graph(graph_path).graph.input}
    return tuple(spec if stated.get(spec.name, True) else replace(spec, shape=(ANY_RANK,)) for spec in inputs)
