"""gRPC requests and responses, without a channel."""

from __future__ import annotations

import contextlib

from hypothesis import given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from graphkiln_backend.graph.errors import ProtocolError
from graphkiln_client.transports.base import InferRequest
from graphkiln_client.transports.grpc_wire import GrpcWire


@settings(max_examples=300, deadline=None)
@given(
    names=st.lists(st.sampled_from(["Y", "Z"]), max_size=3),
    datatype=st.sampled_from(["FP32", "BYTES", "BF16", "INT8", "X"]),
    shape=st.lists(st.integers(-3, 2**62), max_size=3),
    raw=st.lists(st.binary(max_size=12), max_size=3),
)
def test_whatever_the_response_the_error_is_ours(
    names: list[str], datatype: str, shape: list[int], raw: list[bytes]
) -> None:
    outputs = [{"name": name, "datatype": datatype, "shape": shape} for name in names]
    call = GrpcWire().infer(InferRequest(model="m", version="", inputs={}), 1.0, binary=True)
    with contextlib.suppress(ProtocolError):
        call.read(pb.ModelInferResponse(outputs=outputs, raw_output_contents=raw))
