"""Tensors that ONNX Runtime's numpy binding gets wrong: text given as bytes, and bf16."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence

import numpy as np
import onnxruntime

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import SignatureError
from graphkiln_backend.graph.text import as_text

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
    if array.dtype != DType.BF16.numpy:
        return onnxruntime.OrtValue.ortvalue_from_numpy(array)
    return onnxruntime.OrtValue.ortvalue_from_numpy_with_onnx_type(np.ascontiguousarray(array), _ONNX_BF16)


def _to_array(value: onnxruntime.OrtValue) -> AnyArray:
    array: AnyArray
    if value.element_type() != _ONNX_BF16:
        array = value.numpy()
        return array
    array = np.empty(value.shape(), DType.BF16.numpy)
    ctypes.memmove(array.ctypes.data, value.data_ptr(), array.nbytes)
    return array
