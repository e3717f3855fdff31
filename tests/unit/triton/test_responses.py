"""Results as Triton's responses: outputs, scalars, bf16, and errors with their codes."""

from __future__ import annotations

import json
import logging

import fake_triton
import ml_dtypes
import numpy as np
import pytest
from fake_triton import InferenceRequest, TritonError

from graphkiln_backend.graph.errors import (
    EngineUnavailable,
    ExecutionError,
    GraphkilnError,
    InvalidInput,
    ManifestError,
    RepositoryError,
    SignatureError,
    VerificationError,
)
from graphkiln_backend.graph.text import request_prefix
from graphkiln_backend.triton import responses, tensors
from graphkiln_backend.triton.executor import Cancelled
from graphkiln_backend.triton.responses import FailureLog, to_response, to_tensor


def test_outputs_keep_their_names_order_and_types() -> None:
    outputs = {"b": np.array([[1, 2]], np.int64), "a": np.array([0.5], np.float16), "w": np.array([b"x"], np.object_)}
    response = to_response(outputs)
    assert response.error is None
    assert list(response.outputs) == ["b", "a", "w"]
    for name, array in outputs.items():
        assert response.outputs[name] is array


def test_no_output_makes_an_empty_response() -> None:
    response = to_response({})
    assert response.error is None
    assert response.outputs == {}


def test_a_scalar_is_sent_with_one_element() -> None:
    response = to_response({"y": np.array(2.5, np.float32)})
    assert response.outputs["y"].shape == (1,)
    assert response.outputs["y"][0] == 2.5


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_bf16_is_sent_by_dlpack(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 1.5, ml_dtypes.bfloat16)
    tensor = to_tensor("y", array)
    assert tensor.name() == "y"
    assert tensor.content.dtype == ml_dtypes.bfloat16
    assert tensor.content.shape == (shape or (1,))
    assert (tensor.content == 1.5).all()
    assert not tensors._exported, "the consumer is done, but the array is still held"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SignatureError("wrong dtype of input 'x'", expected="a", got="b"), TritonError.INVALID_ARG),
        (ManifestError("bad key"), TritonError.INVALID_ARG),
        (RepositoryError("no graph"), TritonError.NOT_FOUND),
        (EngineUnavailable("no engine"), TritonError.UNAVAILABLE),
        (ExecutionError("the engine failed"), TritonError.INTERNAL),
        (VerificationError("the outputs changed", report="by much"), TritonError.INTERNAL),
        (Cancelled("cancelled"), TritonError.CANCELLED),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, GraphkilnError) else "",
)
def test_an_error_has_tritons_code_and_the_whole_message(error: GraphkilnError, code: int) -> None:
    response = to_response(error)
    assert response.error.code == code
    assert response.error.message == str(error)
    assert response.outputs == {}


def test_the_hint_is_sent_with_the_error() -> None:
    response = to_response(ExecutionError("the graph mixes its rows", hint="serve it with max_batch_size: 0"))
    assert response.error.message == "the graph mixes its rows (serve it with max_batch_size: 0)"


def test_every_error_of_the_tree_has_a_code_of_triton() -> None:
    kinds = [GraphkilnError]
    for kind in kinds:
        kinds += kind.__subclasses__()
    unknown = {kind.__name__ for kind in kinds if not hasattr(fake_triton.TritonError, kind.triton_code)}
    assert not unknown


def test_an_endless_error_is_cut() -> None:
    """GRPC carries it in a header: of a longer one, clients see only that a header is too large."""
    response = to_response(ExecutionError("ä" * 100_000))
    assert len(response.error.message.encode()) <= 2048
    assert response.error.message.endswith("(200000 bytes in all)")


def test_a_failed_request_is_logged_with_its_id(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("GRAPHKILN_LOG_FORMAT", "json")
    monkeypatch.setattr(responses, "FAILURES", FailureLog())
    to_response(ExecutionError("out of memory"), InferenceRequest({}, request_id="mine"))
    to_response({}, InferenceRequest({}, request_id="another"))
    (record,) = caplog.records
    assert "out of memory" in record.getMessage()
    assert vars(record)["request_id"] == "mine"


ERROR = InvalidInput("no image", hint="send one")


def a_request(name: str) -> InferenceRequest:
    return InferenceRequest({}, request_id=name)


@pytest.fixture
def in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHKILN_LOG_FORMAT", "json")


@pytest.mark.usefixtures("in_json")
def test_a_failure_is_a_warning_with_the_requests_id(caplog: pytest.LogCaptureFixture) -> None:
    FailureLog().record(a_request("seven"), ERROR)
    FailureLog().record(None, ERROR)
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert [vars(record)["request_id"] for record in caplog.records] == ["seven", ""]
    assert caplog.messages[0] == f"request failed: INVALID_ARG: {ERROR}"


@pytest.mark.parametrize("said", [None, "text"])
def test_a_log_for_people_has_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, said: str | None
) -> None:
    monkeypatch.delenv("GRAPHKILN_LOG_FORMAT", raising=False)
    if said:
        monkeypatch.setenv("GRAPHKILN_LOG_FORMAT", said)
    FailureLog().record(a_request("seven"), ERROR)
    assert not caplog.records


@pytest.mark.usefixtures("in_json")
def test_a_flood_is_counted_and_the_next_second_says_how_long_it_was(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(responses, "_MOST_A_SECOND", 3)
    now = [100.0]
    log = FailureLog(lambda: now[0])
    for index in range(10):
        log.record(a_request(str(index)), ERROR)
    assert [vars(record)["request_id"] for record in caplog.records] == ["0", "1", "2"]
    now[0] += 1
    log.record(a_request("next"), ERROR)
    assert caplog.messages[3] == "7 more requests failed, which are not listed"
    assert vars(caplog.records[4])["request_id"] == "next"
    now[0] += 1
    log.record(a_request("later"), ERROR)
    assert len(caplog.records) == 6


@pytest.mark.parametrize("name", ["seven", 'a"] forged', "line\nbreak", "\u2028"])
def test_no_id_can_end_its_prefix(name: str) -> None:
    prefix = request_prefix(name)
    assert prefix.isascii()
    assert "\n" not in prefix
    assert json.loads(prefix.removeprefix("[request id: ").removesuffix("] ")) == name


def test_a_request_without_a_name_has_no_prefix() -> None:
    assert request_prefix("") == ""


def test_all_are_counted_by_their_code_also_those_that_are_not_listed() -> None:
    log = FailureLog()
    for _ in range(60):
        log.record(None, ERROR)
    log.record(None, ExecutionError("the engine failed"))
    assert log.counts == {"INVALID_ARG": 60, "INTERNAL": 1}
