"""PyTorch tensors as arrays, and arrays as tensors, of every type that Triton carries; numpy has no bf16 of its own."""

from __future__ import annotations

import numpy as np
import torch

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, ManifestError

_BF16 = DType.BF16.numpy


def to_tensor(array: AnyArray) -> torch.Tensor:
    """A tensor with the elements of an array, without copying them where PyTorch allows.

    Raises:
        ConversionError: PyTorch has no such elements: text.
    """
    if array.dtype == _BF16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    try:
        return torch.from_numpy(array)
    except TypeError as error:
        raise ConversionError(
            f"PyTorch has no tensors of {DType.from_numpy(array.dtype)}", hint="give numbers in the samples"
        ) from error


def to_array(tensor: torch.Tensor) -> AnyArray:
    """An array with the elements of a tensor.

    Raises:
        ConversionError: Triton carries no such elements: complex numbers, 8-bit floats.
    """
    try:
        array: AnyArray = (
            tensor.contiguous().view(torch.int16).numpy().view(_BF16)
            if tensor.dtype is torch.bfloat16
            else tensor.numpy()
        )
        DType.from_numpy(array.dtype)
    except (TypeError, ManifestError) as error:
        raise ConversionError(
            f"a tensor of {tensor.dtype} cannot be served", hint="convert it in forward: .float()"
        ) from error
    return array
