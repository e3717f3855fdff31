"""Convert results to Triton's responses; count and log failed requests."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import triton_python_backend_utils as pb_utils

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.text import bounded
from graphkiln_backend.triton.environment import LOG_FORMAT_VARIABLE
from graphkiln_backend.triton.executor import InferenceRequest, Result
from graphkiln_backend.triton.tensors import to_dlpack

_BF16 = DType.BF16.numpy
_MOST_A_SECOND = 50  # invalid requests at full speed must not fill the disk

_log = logging.getLogger("graphkiln.triton")


class FailureLog:
    """Count failed requests, and log at most `_MOST_A_SECOND` of them a second.

    They are logged only with `serve --log-format json`: on a terminal, mistakes of clients would hide everything else.
    The number of omitted lines is logged when the second is over.

    Args:
        clock: Returns seconds.

    Attributes:
        counts: Failures so far, by Triton's code.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter()
        self._clock = clock
        self._is_on = os.environ.get(LOG_FORMAT_VARIABLE) == "json"
        self._second = 0.0
        self._logged = 0

    def record(self, request: InferenceRequest | None, error: GraphkilnError) -> None:
        """Count a failed request, and log the error with the request's id."""
        self.counts[error.triton_code] += 1
        if not self._is_on:
            return
        now = self._clock()
        if now - self._second >= 1:
            if self._logged > _MOST_A_SECOND:
                _log.warning("%d more requests failed and were not logged", self._logged - _MOST_A_SECOND)
            self._second, self._logged = now, 0
        self._logged += 1
        if self._logged <= _MOST_A_SECOND:
            request_id = request.request_id() if request else ""
            _log.warning("request failed: %s: %s", error.triton_code, error, extra={"request_id": request_id})


FAILURES = FailureLog()  # one per process, that is, per instance


def to_response(result: Result, request: InferenceRequest | None = None) -> Any:
    """Build the `pb_utils.InferenceResponse` of a result; errors are logged with the id of the request."""
    if isinstance(result, GraphkilnError):
        FAILURES.record(request, result)
        code = getattr(pb_utils.TritonError, result.triton_code)
        return pb_utils.InferenceResponse(error=pb_utils.TritonError(bounded(str(result)), code))
    return pb_utils.InferenceResponse([to_tensor(name, array) for name, array in result.items()])


def to_tensor(name: str, array: AnyArray) -> Any:
    """Build a `pb_utils.Tensor`. Triton has no scalars: shape [] becomes [1]."""
    if not array.ndim:
        array = array.reshape(1)
    if array.dtype != _BF16:
        return pb_utils.Tensor(name, array)
    return pb_utils.Tensor.from_dlpack(name, to_dlpack(array))
