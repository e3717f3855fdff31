"""Results as Triton's responses: outputs, scalars, bf16, and errors with their codes."""

from __future__ import annotations

import fake_triton
import ml_dtypes
import numpy as np
import pytest
from fake_triton import InferenceRequest, TritonError

from graphkiln_backend.graph.errors import (
    EngineUnavailable,
    ExecutionError,
    GraphkilnError,
    ManifestError,
    RepositoryError,
    SignatureError,
    VerificationError,
)
from graphkiln_backend.triton import responses, tensors
from graphkiln_backend.triton.executor import Cancelled
from graphkiln_backend.triton.failures import FailureLog
from graphkiln_backend.triton.responses import to_response, to_tensor


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
