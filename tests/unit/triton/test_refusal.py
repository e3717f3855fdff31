"""An instance that computes wrongly: an error for every request, which clients take as transient."""

from __future__ import annotations

import numpy as np
from fake_triton import InferenceRequest, TritonError

from graphkiln_backend.triton.executor import InstanceFault, Refusal
from graphkiln_backend.triton.responses import to_response


def test_every_request_is_refused_with_the_reason() -> None:
    refusal = Refusal("output 'y' differs")
    request = InferenceRequest({"x": np.ones((1, 2), np.float32)})
    for result in (refusal.execute(request), *refusal.execute_batch([request, request])):
        assert isinstance(result, InstanceFault)
        assert "output 'y' differs" in str(result)
        assert to_response(result).error.code == TritonError.UNAVAILABLE
