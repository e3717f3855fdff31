"""What the executor computed, as Triton's responses."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.text import bounded
from graphkiln_backend.triton.executor import Result
from graphkiln_backend.triton.failures import FailureLog, Identified
from graphkiln_backend.triton.tensors import to_dlpack

_BF16 = DType.BF16.numpy
FAILURES = FailureLog()  # of this process, which is one instance


def to_response(result: Result, request: Identified | None = None) -> Any:
    """A `pb_utils.InferenceResponse` with a request's outputs, or with its error, which is logged.

    Args:
        result: What came of it.
        request: Whose id the log names.
    """
    if isinstance(result, GraphkilnError):
        FAILURES.tell(request, result)
        code = getattr(pb_utils.TritonError, result.triton_code)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(bounded(str(result)), code))
    return pb_utils.InferenceResponse([to_tensor(name, array) for name, array in result.items()])


def to_tensor(name: str, array: AnyArray) -> Any:
    """A `pb_utils.Tensor` of an array. Triton has no scalars: shape [] is sent as [1]."""
    if not array.ndim:
        array = array.reshape(1)
    if array.dtype != _BF16:
        return pb_utils.Tensor(name, array)
    return pb_utils.Tensor.from_dlpack(name, to_dlpack(array))
