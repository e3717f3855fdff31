"""HTTP requests and responses, without a connection."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.transports.base import InferRequest
from graphkiln_client.transports.http_wire import HttpResponse, HttpWire


@settings(max_examples=300, deadline=None)
@given(
    document=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(
                    [
                        "outputs",
                        "name",
                        "shape",
                        "datatype",
                        "parameters",
                        "binary_data_size",
                        "data",
                        "id",
                        "model_name",
                    ]
                ),
                inner,
                max_size=5,
            )
        ),
        max_leaves=15,
    ),
    tail=st.binary(max_size=20),
)
def test_whatever_the_response_the_error_is_ours(document: Any, tail: bytes) -> None:
    head = json.dumps(document).encode()
    call = HttpWire().infer(InferRequest(model="m", version="", inputs={}, request_id="1"), 1.0, binary=True)
    response = HttpResponse(status=200, headers={"Inference-Header-Content-Length": str(len(head))}, body=head + tail)
    with contextlib.suppress(ProtocolError):
        call.read(response)
