"""KServe v2 over HTTP with binary tensors, on httpx."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import quote

import httpx

from graphkiln.client.transports.base import InferRequest, InferResponse, from_bytes, raw_buffer
from graphkiln.graph.dtypes import AnyArray, DType
from graphkiln.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    Overloaded,
    ProtocolError,
    ServerError,
    Unauthorized,
)

_HEADER_LENGTH = "Inference-Header-Content-Length"


class HttpTransport:
    """A pool of keep-alive connections to one HTTP endpoint."""

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._client = httpx.Client(base_url=self._url, limits=httpx.Limits(max_connections=64))

    def ready(self, timeout_s: float) -> bool:
        """See `Transport.ready`."""
        return self._send("GET", "/v2/health/ready", timeout_s).status_code == 200

    def model_metadata(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """See `Transport.model_metadata`."""
        return self._document(_model_path(model, version), timeout_s)

    def model_config(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """See `Transport.model_config`."""
        return self._document(_model_path(model, version) + "/config", timeout_s)

    def model_statistics(self, model: str, version: str, timeout_s: float) -> dict[str, Any]:
        """See `Transport.model_statistics`."""
        return self._document(_model_path(model, version) + "/stats", timeout_s)

    def repository_index(self, timeout_s: float) -> list[dict[str, Any]]:
        """See `Transport.repository_index`."""
        response = self._ask("POST", "/v2/repository/index", timeout_s)
        rows = _json(response.content)
        if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
            raise ProtocolError(f"the server's index is not a list of models: {response.content[:80]!r}")
        return rows

    def load(self, model: str, timeout_s: float) -> None:
        """See `Transport.load`."""
        self._ask("POST", f"/v2/repository/models/{quote(model, safe='')}/load", timeout_s)

    def unload(self, model: str, timeout_s: float) -> None:
        """See `Transport.unload`."""
        self._ask("POST", f"/v2/repository/models/{quote(model, safe='')}/unload", timeout_s)

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        """See `Transport.infer`."""
        body, header_length = encode_request(request)
        response = self._send(
            "POST",
            _model_path(request.model, request.version) + "/infer",
            timeout_s,
            content=body,
            headers={_HEADER_LENGTH: str(header_length)},
        )
        if response.status_code != 200:
            raise _error(response, request.request_id)
        length = response.headers.get(_HEADER_LENGTH)
        return decode_response(response.content, int(length) if length and length.isdecimal() else None)

    def close(self) -> None:
        """See `Transport.close`."""
        self._client.close()

    def _document(self, path: str, timeout_s: float) -> dict[str, Any]:
        return _json_object(self._ask("GET", path, timeout_s).content)

    def _ask(self, method: str, path: str, timeout_s: float) -> httpx.Response:
        response = self._send(method, path, timeout_s)
        if response.status_code != 200:
            raise _error(response, None)
        return response

    def _send(self, method: str, path: str, timeout_s: float, **content: Any) -> httpx.Response:
        try:
            return self._client.request(method, path, timeout=timeout_s, **content)
        except httpx.TimeoutException as error:
            raise DeadlineExceeded(f"no answer from {self._url} within {timeout_s:g} s") from error
        except httpx.DecodingError as error:
            raise ProtocolError(f"{self._url} answers with damaged content: {error}") from error
        except httpx.RemoteProtocolError as error:
            raise ConnectionFailed(f"{self._url} broke off the answer: {error}") from error
        except (httpx.TransportError, httpx.InvalidURL) as error:
            raise ConnectionFailed(
                f"cannot reach {self._url}: {error}", hint="is the server running? graphkiln health --url URL"
            ) from error


def encode_request(request: InferRequest) -> tuple[bytes, int]:
    """The body of an infer call.

    Returns:
        The body (JSON header, then every input's bytes), and the header's length in bytes.

    Source: KServe v2 protocol, binary tensor data extension.
    """
    inputs: list[dict[str, Any]] = []
    parts: list[Any] = []
    for name, array in request.inputs.items():
        raw = raw_buffer(array)
        parts.append(raw)
        inputs.append(
            {
                "name": name,
                "datatype": DType.from_numpy(array.dtype).value,
                "shape": list(array.shape),
                "parameters": {"binary_data_size": len(raw)},
            }
        )
    header: dict[str, Any] = {"inputs": inputs}
    if request.request_id:
        header["id"] = request.request_id
    if request.outputs:
        header["outputs"] = [
            {"name": name, "parameters": {"binary_data": True, **({"classification": count} if count else {})}}
            for name, count in request.outputs.items()
        ]
    else:
        header["parameters"] = {"binary_data_output": True}
    head = json.dumps(header, separators=(",", ":")).encode()
    return b"".join((head, *parts)), len(head)


def decode_response(body: bytes, header_length: int | None) -> InferResponse:
    """Reads the answer of an infer call, with binary or JSON tensors.

    Raises:
        ProtocolError: The body is not what the protocol promises.
    """
    document = _json_object(body if header_length is None else body[:header_length])
    offset = len(body) if header_length is None else header_length
    outputs: dict[str, AnyArray] = {}
    try:
        for output in document["outputs"]:
            shape = tuple(output["shape"])
            size = output.get("parameters", {}).get("binary_data_size")
            if size is None:
                raise ProtocolError(f"output '{output['name']}' did not come as binary data")
            outputs[output["name"]] = from_bytes(memoryview(body)[offset : offset + size], output["datatype"], shape)
            offset += size
        return InferResponse(
            model=document["model_name"], version=str(document.get("model_version", "")), outputs=outputs
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ProtocolError(f"the server's answer lacks {error}", body=str(document)[:500]) from error


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise ProtocolError(f"the server's answer is not JSON: {body[:80]!r}") from error


def _json_object(body: bytes) -> dict[str, Any]:
    document = _json(body)
    if not isinstance(document, dict):
        raise ProtocolError(f"the server's answer is not a JSON object: {body[:80]!r}")
    return document


_BY_STATUS: dict[int, type[ClientError]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Unauthorized,
    404: ModelNotFound,
    408: DeadlineExceeded,
    429: Overloaded,
    499: DeadlineExceeded,
    502: ModelNotReady,
    503: ModelNotReady,
    504: DeadlineExceeded,
}


def _error(response: httpx.Response, request_id: str | None) -> ClientError:
    """One table from HTTP status to the error tree. Source: Triton's `HTTPAPIServer` status mapping."""
    body = response.text[:2000]
    try:
        words = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        words = body or response.reason_phrase
    kind = _BY_STATUS.get(response.status_code, ServerError)
    return kind(
        f"the server answers {response.status_code}: {words}",
        status=response.status_code,
        body=body,
        request_id=request_id,
    )
