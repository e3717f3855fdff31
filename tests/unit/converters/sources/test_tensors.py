"""Tensors as arrays and back, of every type that both have."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.tensors import to_array, to_tensor


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool])
def test_there_and_back(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[0.0, 1.0], [2.5, -3.0]]).to(dtype)
    array = to_array(tensor.T)
    assert array.shape == (2, 2)
    np.testing.assert_array_equal(array.astype("f4"), tensor.T.float().numpy())
    back = to_tensor(array)
    assert back.dtype is dtype
    assert bool((back == tensor.T).all())


def test_one_number_has_no_dimensions() -> None:
    assert to_array(torch.tensor(1.5, dtype=torch.bfloat16)).shape == ()
    assert to_tensor(np.asarray(DType.BF16.numpy.type(2))).shape == ()


def test_text_is_none() -> None:
    with pytest.raises(ConversionError, match="PyTorch has no tensors of BYTES"):
        to_tensor(np.array(["a"], np.object_))


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fn])
def test_what_triton_does_not_carry(dtype: torch.dtype) -> None:
    with pytest.raises(ConversionError, match=f"a tensor of {dtype} cannot be served"):
        to_array(torch.zeros(2, dtype=dtype))
