"""Responses of Triton: outputs, scalars, bf16, errors and their codes; logs of failures and of graphkiln's loggers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
from fake_triton import InferenceRequest, Logger, TritonError

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
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.responses import FailureLog, to_response, to_tensor


def test_outputs_keep_names_order_and_types() -> None:
    outputs = {"b": np.array([[1, 2]], np.int64), "a": np.array([0.5], np.float16), "w": np.array([b"x"], np.object_)}
    response = to_response(outputs)
    assert response.error is None
    assert list(response.outputs) == ["b", "a", "w"]
    for name, array in outputs.items():
        assert response.outputs[name] is array


def test_scalar_output_has_one_element() -> None:
    response = to_response({"y": np.array(2.5, np.float32)})
    assert response.outputs["y"].shape == (1,)
    assert response.outputs["y"][0] == 2.5


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_bf16_output(shape: tuple[int, ...]) -> None:
    array = np.full(shape, 1.5, ml_dtypes.bfloat16)
    tensor = to_tensor("y", array)
    assert tensor.name() == "y"
    assert tensor.content.dtype == ml_dtypes.bfloat16
    assert tensor.content.shape == (shape or (1,))
    assert (tensor.content == 1.5).all()
    assert not tensors._exported, "the array is kept alive after its consumer is done"


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
def test_error_codes_and_messages(error: GraphkilnError, code: int) -> None:
    response = to_response(error)
    assert response.error.code == code
    assert response.error.message == str(error)
    assert response.outputs == {}


def test_long_error_is_truncated() -> None:
    """GRPC sends the message in a header of limited size."""
    response = to_response(ExecutionError("ä" * 100_000))
    assert len(response.error.message.encode()) <= 2048
    assert response.error.message.endswith("(200000 bytes in all)")


def test_failed_request_is_logged_with_its_id(
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


@pytest.mark.parametrize("log_format", [None, "text"])
def test_failures_are_logged_only_as_json(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, log_format: str | None
) -> None:
    monkeypatch.delenv("GRAPHKILN_LOG_FORMAT", raising=False)
    if log_format:
        monkeypatch.setenv("GRAPHKILN_LOG_FORMAT", log_format)
    FailureLog().record(a_request("seven"), ERROR)
    assert not caplog.records


@pytest.mark.usefixtures("in_json")
def test_failure_log_is_rate_limited(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(responses, "_MOST_A_SECOND", 3)
    now = [100.0]
    log = FailureLog(lambda: now[0])
    for index in range(10):
        log.record(a_request(str(index)), ERROR)
    assert [vars(record)["request_id"] for record in caplog.records] == ["0", "1", "2"]
    now[0] += 1
    log.record(a_request("next"), ERROR)
    assert caplog.messages[3] == "7 more requests failed and were not logged"
    assert vars(caplog.records[4])["request_id"] == "next"
    now[0] += 1
    log.record(a_request("later"), ERROR)
    assert len(caplog.records) == 6


@pytest.mark.parametrize("name", ["seven", 'a"] forged', "line\nbreak", "\u2028"])
def test_request_id_cannot_break_its_prefix(name: str) -> None:
    prefix = request_prefix(name)
    assert prefix.isascii()
    assert "\n" not in prefix
    assert json.loads(prefix.removeprefix("[request id: ").removesuffix("] ")) == name


def test_omitted_failures_are_counted() -> None:
    log = FailureLog()
    for _ in range(60):
        log.record(None, ERROR)
    log.record(None, ExecutionError("the engine failed"))
    assert log.counts == {"INVALID_ARG": 60, "INTERNAL": 1}


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    logger = logging.getLogger("graphkiln")
    level, handlers = logger.level, logger.handlers
    yield
    logger.setLevel(level)
    logger.handlers = handlers


def test_lines_have_the_model_and_the_level() -> None:
    log_to_triton("digits")
    logging.getLogger("graphkiln.lowering").info("%d candidates", 3)
    logging.getLogger("graphkiln.triton").warning("padded")
    logging.getLogger("graphkiln.cache").error("damaged")
    assert Logger.lines == [
        ("info", "graphkiln: digits: 3 candidates"),
        ("warning", "graphkiln: digits: padded"),
        ("warning", "graphkiln: digits: damaged"),
    ]


def test_other_loggers_are_unchanged() -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    log_to_triton("digits")
    logging.getLogger("other").warning("not graphkiln's")
    assert not Logger.lines
    assert (root.level, root.handlers) == before


def test_traceback_is_logged() -> None:
    log_to_triton("digits")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logging.getLogger("graphkiln.triton").exception("a request failed")
    ((_, line),) = Logger.lines
    assert line.startswith("graphkiln: digits: a request failed\nTraceback")
    assert line.endswith("ZeroDivisionError: division by zero")


def test_request_id_is_logged() -> None:
    log_to_triton("digits")
    logging.getLogger("graphkiln.triton").warning("refused", extra={"request_id": 'a"] b'})
    logging.getLogger("graphkiln.triton").warning("refused", extra={"request_id": ""})
    assert Logger.lines == [
        ("warning", r'graphkiln: digits: [request id: "a\"] b"] refused'),
        ("warning", "graphkiln: digits: refused"),
    ]
