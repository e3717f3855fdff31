"""Sends the fuzzer's cases, and compares the answers to the valid ones with their references."""

from __future__ import annotations

import http.client
import socket
import zlib
from typing import Any

import grpc
import numpy as np
from tritonclient.grpc import service_pb2

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.system.closing import Closeable
from graphkiln_client.results import Classification
from soaking.fuzz_grpc import GrpcCase
from soaking.fuzz_http import HttpCase
from soaking.fuzz_raw import RawCase, exchange
from soaking.fuzz_streams import METHOD, StreamCase
from soaking.ledger import DEADLINE_S, NoAnswer, WrongAnswer
from soaking.models import DIGIT_LABELS, TOLERANCE, SoakModel, difference
from soaking.reaching import Reach
from soaking.senders import from_bytes, read_response

Case = HttpCase | GrpcCase | RawCase | StreamCase


class Asker(Closeable):
    """Connections to a server.

    Args:
        reach: Where it listens.
    """

    def __init__(self, reach: Reach) -> None:
        self._reach = reach
        self._http: http.client.HTTPConnection | None = None
        self._channel = grpc.insecure_channel(f"127.0.0.1:{reach.grpc_port}")

    def ask(self, case: Case) -> str:
        """Sends a case; returns the status of the response.

        Raises:
            WrongAnswer: The answer to a valid case is another one.
            NoAnswer: There was none within the deadline.
            Exception: Whatever the protocol's library makes of an error.
        """
        match case:
            case HttpCase():
                return self._ask_http(case)
            case GrpcCase():
                return self._ask_grpc(case)
            case RawCase():
                return self._ask_raw(case)
            case StreamCase():
                return self._ask_stream(case)

    def _ask_http(self, case: HttpCase) -> str:
        response, content = self._exchange_http(case)
        if case.model is None:
            return str(response.status)
        if response.status != http.HTTPStatus.OK:
            raise http.client.HTTPException(f"HTTP {response.status} {content[:200]!r}")
        check_http(case, response, content)
        return "200"

    def _exchange_http(self, case: HttpCase) -> tuple[http.client.HTTPResponse, bytes]:
        if self._http is None:
            self._http = self._reach.connect_http(DEADLINE_S)
        try:
            self._http.request(case.method, case.path, case.body, dict(case.headers))
            response = self._http.getresponse()
            content = response.read()
        except TimeoutError as error:
            self._hang_up()
            raise NoAnswer(f"within {DEADLINE_S:.0f} s") from error
        except BaseException:
            self._hang_up()
            raise
        if response.will_close:
            self._hang_up()
        return response, content

    def _ask_grpc(self, case: GrpcCase) -> str:
        call = self._channel.unary_unary(case.method)
        content = call(case.body, timeout=DEADLINE_S)
        if case.model is not None:
            check_grpc(case, content)
        return "OK"

    def _ask_stream(self, case: StreamCase) -> str:
        responses = list(self._channel.stream_stream(METHOD)(iter(case.bodies), timeout=DEADLINE_S))
        if case.valid:
            check_stream(case, responses)
        return "OK"

    def _ask_raw(self, case: RawCase) -> str:
        port = self._reach.http_port if case.protocol == "HTTP" else self._reach.grpc_port
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as connection:
            try:
                return exchange(connection, case.body)
            except TimeoutError as error:
                raise NoAnswer(f"the connection stays open for {DEADLINE_S:.0f} s") from error

    def _hang_up(self) -> None:
        if self._http is not None:
            self._http.close()
            self._http = None

    def close(self) -> None:
        """Closes its connections."""
        self._hang_up()
        self._channel.close()


def check_http(case: HttpCase, response: http.client.HTTPResponse, content: bytes) -> None:
    """Compares the answer to a valid HTTP request with the reference.

    Raises:
        WrongAnswer: It is another one.
    """
    if encoding := response.headers.get("Content-Encoding"):
        content = zlib.decompress(content, 31 if encoding == "gzip" else 15)
    outputs, told = read_response(response, content)
    if case.class_count:
        check_classes(case, outputs)
    else:
        _check(case, outputs, told)


def check_grpc(case: GrpcCase, content: bytes) -> None:
    """Compares the answer to a valid gRPC request with the reference.

    Raises:
        WrongAnswer: It is another one.
    """
    _check_message(case, service_pb2.ModelInferResponse.FromString(content))


def check_stream(case: StreamCase, contents: list[bytes]) -> None:
    """Compares the answers to a valid stream with their references.

    Raises:
        WrongAnswer: One is another one, or missing, or comes twice.
    """
    messages = [service_pb2.ModelStreamInferResponse.FromString(content) for content in contents]
    if error := next((message.error_message for message in messages if message.error_message), ""):
        raise WrongAnswer(f"a valid stream got: {error[:200]}")
    answers = sorted((message.infer_response for message in messages), key=lambda answer: int(answer.id))
    if [int(answer.id) for answer in answers] != list(range(len(case.valid))):
        raise WrongAnswer(f"{len(case.valid)} requests of a stream got answers {[answer.id for answer in answers]}")
    for each, answer in zip(case.valid, answers, strict=True):
        _check_message(each, answer)


def _check_message(case: GrpcCase, response: Any) -> None:
    outputs = {
        output.name: from_bytes(output.datatype, list(output.shape), raw)
        for output, raw in zip(response.outputs, response.raw_output_contents, strict=True)
    }
    _check(case, outputs, int(response.model_version))


def _check(case: HttpCase | GrpcCase, outputs: dict[str, AnyArray], told: int | None) -> None:
    model = _model_of(case)
    version = int(case.version or told or 0)
    if version != told:
        raise WrongAnswer(f"version {told} answered in place of {version}")
    if text := difference(model.reference(version, case.feeds), outputs):
        raise WrongAnswer(f"{model.name} version {version}: {text}")


def _model_of(case: HttpCase | GrpcCase) -> SoakModel:
    if case.model is None:
        raise ValueError("a case without a model has no right answer")
    return case.model


def check_classes(case: HttpCase, outputs: dict[str, AnyArray]) -> None:
    """Compares rankings `score:index:label` with the reference.

    Raises:
        WrongAnswer: A class or score is another one.
    """
    expected = _model_of(case).reference(1, case.feeds)["OUTPUT_0"]
    for scores, texts in zip(expected, outputs["OUTPUT_0"], strict=True):
        best = np.argsort(-scores, kind="stable")[: case.class_count]
        got = [Classification.parse(text.decode()) for text in texts]
        named = [(int(index), DIGIT_LABELS[index]) for index in best]
        if [(entry.index, entry.label) for entry in got] != named:
            raise WrongAnswer(f"classes {got} instead of {named}")
        if not np.allclose([entry.score for entry in got], scores[best], TOLERANCE, TOLERANCE):
            raise WrongAnswer(f"scores {got} instead of {scores[best]}")
