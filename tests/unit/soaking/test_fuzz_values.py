"""The fuzzer's strategies: what they make can be sent."""

from __future__ import annotations

import json

import hypothesis
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2

from soaking.fuzz_grpc import any_calls, messages, valid_calls
from soaking.fuzz_http import HttpCase, http_cases, valid_cases
from soaking.fuzz_values import damaged, mutations

few = hypothesis.settings(max_examples=30, suppress_health_check=list(hypothesis.HealthCheck))


@few
@hypothesis.given(st.data())
def test_a_mutated_document_is_still_json(data: st.DataObject) -> None:
    document = {"inputs": [{"name": "x", "shape": [1, 2], "data": [1.0, 2.0]}], "id": "7"}
    changed = data.draw(mutations(document))
    assert json.loads(json.dumps(changed)) == changed
    assert document["id"] == "7", "the original stays"


@few
@hypothesis.given(damaged(b"some bytes of a request"))
def test_damaged_bytes_are_bytes(content: bytes) -> None:
    assert isinstance(content, bytes)


@few
@hypothesis.given(http_cases)
def test_every_http_case_can_be_sent(case: HttpCase) -> None:
    case.path.encode("ascii")
    assert not set(case.path) & set(" \r\n")
    assert isinstance(case.body, bytes)


@few
@hypothesis.given(valid_cases())
def test_a_valid_http_request_says_what_it_expects(case: HttpCase) -> None:
    assert case.model is not None
    assert case.feeds.keys() == case.model.inputs.keys()


@few
@hypothesis.given(valid_calls())
def test_a_valid_grpc_request_can_be_read_back(case: object) -> None:
    request = service_pb2.ModelInferRequest.FromString(case.body)  # type: ignore[attr-defined]
    assert len(request.inputs) == len(request.raw_input_contents)


@few
@hypothesis.given(messages(service_pb2.ModelInferRequest))
def test_messages_are_built_from_their_descriptor(message: object) -> None:
    assert isinstance(message, service_pb2.ModelInferRequest)


@few
@hypothesis.given(any_calls())
def test_every_call_names_a_method_of_triton(case: object) -> None:
    assert case.method.startswith("/inference.GRPCInferenceService/")  # type: ignore[attr-defined]
