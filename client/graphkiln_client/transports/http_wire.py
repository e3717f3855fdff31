"""KServe v2 over HTTP: its requests and responses."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from graphkiln_backend.graph.contract import REQUEST_PARAMETER as CONTRACT
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import (
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
from graphkiln_backend.graph.text import bounded, in_path, without_traceback
from graphkiln_client.transports.base import (
    Call,
    InferRequest,
    InferResponse,
    RequestedOutput,
    SharedTensor,
)
from graphkiln_client.transports.endpoint import Compression, Endpoint
from graphkiln_client.transports.failures import hint_for
from graphkiln_client.transports.limits import (
    DOCUMENT_LIMIT,
    check_json,
    infer_limit,
)
from graphkiln_client.transports.tensors import datatype_of, from_raw, from_values, to_raw

_HEADER_LENGTH = "Inference-Header-Content-Length"
_COMPRESSION_LEVEL = 1  # the fastest: pixels and weights hardly shrink further
_SHOWN_BODY = 2000
_READ_BODY = 1 << 16  # of an error: more than a server's own text, escaped as JSON
_MOST_DIGITS = 19  # of a length: a 64-bit number
_PAGE = re.compile(r"\s*<(?:!doctype html|html)\b(?:.*?<title[^>]*>\s*(?P<title>[^<]*?)\s*</title>)?", re.I | re.S)
# What to do about it.
_NOT_TRITON = "that is a page in HTML, which Triton never sends: is it another server, or a gateway before it?"


@dataclass(kw_only=True, slots=True)
class HttpRequest:
    """One HTTP request.

    Attributes:
        method: GET or POST.
        path: Path on the server, quoted.
        body: Buffers that make up the body, in order.
        headers: Beside those of the connection.
        is_admin: True if it changes the server, and needs its admin key.
        limit_bytes: Most bytes of the response's body.
    """

    method: str
    path: str
    body: tuple[bytes | memoryview, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    limit_bytes: int = DOCUMENT_LIMIT
    is_admin: bool = False

    def authorize(self, endpoint: Endpoint) -> HttpRequest:
        """The request with the admin key, if it needs one."""
        return replace(self, headers={**self.headers, **endpoint.admin_headers()}) if self.is_admin else self


class Headers(Protocol):
    """The headers of a response, by name in any case."""

    def get(self, name: str, /) -> str | None:
        """The header's text, or None."""
        ...


@dataclass(kw_only=True, slots=True)
class HttpResponse:
    """One HTTP response.

    Attributes:
        status: Status code.
        headers: Its headers.
        body: Decompressed.
    """

    status: int
    headers: Headers
    body: bytes


class HttpWire:
    """See `Wire`.

    Args:
        compression: How request bodies are compressed; responses are requested in the same form.
    """

    def __init__(self, compression: Compression = "") -> None:
        self._compression = compression
        self._infer_limit = infer_limit()

    def ready(self) -> Call[bool]:
        """See `Wire.ready`."""
        return Call(HttpRequest(method="GET", path="/v2/health/ready"), _read_ready)

    def live(self) -> Call[bool]:
        """See `Wire.live`."""
        return Call(HttpRequest(method="GET", path="/v2/health/live"), _read_ready)

    def server_metadata(self) -> Call[dict[str, Any]]:
        """See `Wire.server_metadata`."""
        return _document("/v2")

    def model_metadata(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_metadata`."""
        return _document(_model_path(model, version))

    def model_config(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_config`."""
        return _document(_model_path(model, version) + "/config")

    def model_statistics(self, model: str, version: str) -> Call[dict[str, Any]]:
        """See `Wire.model_statistics`."""
        return _document((_model_path(model, version) if model else "/v2/models") + "/stats")

    def repository_index(self) -> Call[list[dict[str, Any]]]:
        """See `Wire.repository_index`."""
        return Call(_post_admin("/v2/repository/index"), _read_index)

    def load(self, model: str, config: str = "") -> Call[None]:
        """See `Wire.load`."""
        body = json.dumps({"parameters": {"config": config}} if config else {}).encode()
        return Call(_post_admin(f"/v2/repository/models/{in_path(model)}/load", body), _read_nothing)

    def unload(self, model: str) -> Call[None]:
        """See `Wire.unload`."""
        return Call(_post_admin(f"/v2/repository/models/{in_path(model)}/unload"), _read_nothing)

    def register_region(self, name: str, key: str, size_bytes: int) -> Call[None]:
        """See `Wire.register_region`."""
        body = json.dumps({"key": key, "offset": 0, "byte_size": size_bytes}).encode()
        return Call(_post_admin(f"{_region_path(name)}/register", body), _read_nothing)

    def region_status(self, name: str) -> Call[None]:
        """See `Wire.region_status`."""
        return Call(HttpRequest(method="GET", path=f"{_region_path(name)}/status", is_admin=True), _read_nothing)

    def unregister_region(self, name: str) -> Call[None]:
        """See `Wire.unregister_region`."""
        return Call(_post_admin(f"{_region_path(name)}/unregister"), _read_nothing)

    def infer(self, request: InferRequest, timeout_s: float, *, binary: bool) -> Call[InferResponse]:
        """See `Wire.infer`."""
        parts, header_length = encode_request(request, timeout_s, binary=binary)
        headers = {_HEADER_LENGTH: str(header_length)} if binary else {"Content-Type": "application/json"}
        if self._compression:
            parts = [_COMPRESS[self._compression](b"".join(parts))]
            headers |= {"Content-Encoding": self._compression, "Accept-Encoding": self._compression}
        path = _model_path(request.model, request.version) + "/infer"
        message = HttpRequest(
            method="POST", path=path, body=tuple(parts), headers=headers, limit_bytes=self._infer_limit
        )
        return Call(message, lambda response: _read_infer(response, request))


_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, _COMPRESSION_LEVEL),
    "deflate": lambda data: zlib.compress(data, _COMPRESSION_LEVEL),
}


def _post_admin(path: str, body: bytes = b"{}") -> HttpRequest:
    json_type = {"Content-Type": "application/json"}
    return HttpRequest(method="POST", path=path, body=(body,), headers=json_type, is_admin=True)


def _document(path: str) -> Call[dict[str, Any]]:
    return Call(HttpRequest(method="GET", path=path), lambda response: json_object(_check(response).body))


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{in_path(model)}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _region_path(name: str) -> str:
    return f"/v2/systemsharedmemory/region/{quote(name, safe='')}"


def _read_ready(response: HttpResponse) -> bool:
    """200 means yes, 503 (or Triton's 400) no; where the request itself was refused, it is an error."""
    if response.status in (401, 403, 404, 429):
        raise http_error(response, None)
    return response.status == 200


def _read_nothing(response: HttpResponse) -> None:
    _check(response)


def _read_index(response: HttpResponse) -> list[dict[str, Any]]:
    rows = parse_json(_check(response).body)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError(f"the server's index is not a list of models: {response.body[:80]!r}")
    return rows


def _read_infer(response: HttpResponse, request: InferRequest) -> InferResponse:
    length = _check(response, request.request_id).headers.get(_HEADER_LENGTH) or ""
    plausible = length.isdecimal() and len(length) < _MOST_DIGITS
    return decode_response(response.body, int(length) if plausible else None, request)


def _check(response: HttpResponse, request_id: str | None = None) -> HttpResponse:
    if response.status != 200:
        raise http_error(response, request_id)
    return response


def encode_request(
    request: InferRequest, timeout_s: float | None, *, binary: bool = True
) -> tuple[list[bytes | memoryview], int]:
    """The body of an infer call.

    Returns:
        The body's parts (JSON header, then every input's bytes), and the header's length in bytes.

    Raises:
        InvalidInput: An array cannot be sent in this form.

    Source: KServe v2 protocol; Triton's binary tensor data, shared memory and schedule policy extensions.
    """
    parts: list[bytes | memoryview] = [b""]
    inputs = [_input_row(name, tensor, parts, binary=binary) for name, tensor in request.inputs.items()]
    header: dict[str, Any] = {"inputs": inputs}
    if request.request_id:
        header["id"] = request.request_id
    parameters: dict[str, Any] = {} if timeout_s is None else {"timeout": round(timeout_s * 1e6)}
    if request.contract:
        parameters[CONTRACT] = request.contract
    if request.outputs:
        header["outputs"] = [_output_row(name, output, binary=binary) for name, output in request.outputs.items()]
    elif binary:
        parameters["binary_data_output"] = True
    if parameters:
        header["parameters"] = parameters
    parts[0] = json.dumps(header, separators=(",", ":")).encode()
    return parts, len(parts[0])


def _input_row(
    name: str, tensor: AnyArray | SharedTensor, parts: list[bytes | memoryview], *, binary: bool
) -> dict[str, Any]:
    """An input's row of the JSON header; its bytes, where it travels as bytes, are appended to the parts."""
    if isinstance(tensor, SharedTensor):
        shared = {"name": name, "datatype": tensor.datatype.value, "shape": list(tensor.shape)}
        return {**shared, "parameters": _region_parameters(tensor)}
    row: dict[str, Any] = {"name": name, "datatype": datatype_of(name, tensor), "shape": list(tensor.shape)}
    if not binary:
        return {**row, "data": _json_data(name, tensor)}
    raw = to_raw(tensor)
    parts.append(raw)
    row["parameters"] = {"binary_data_size": len(raw)}
    return row


def _region_parameters(tensor: SharedTensor) -> dict[str, Any]:
    return {
        "shared_memory_region": tensor.region,
        "shared_memory_offset": tensor.offset,
        "shared_memory_byte_size": tensor.size_bytes,
    }


def _output_row(name: str, output: RequestedOutput, *, binary: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = {"binary_data": True} if binary else {}
    if output.shared:
        parameters = _region_parameters(output.shared)
    if output.class_count:
        parameters["classification"] = output.class_count
    return {"name": name, "parameters": parameters} if parameters else {"name": name}


def _json_data(name: str, array: AnyArray) -> list[Any]:
    """The elements as JSON values. Source: KServe v2, "Tensor Data": 16-bit floats have none."""
    dtype = DType(datatype_of(name, array))
    if dtype in (DType.FP16, DType.BF16):
        raise InvalidInput(f"input '{name}' is {dtype}, which the server's JSON protocol cannot carry")
    try:
        if dtype is DType.BYTES:
            return [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input '{name}' holds bytes that are no text: JSON cannot carry them") from error
    if dtype.is_float and not np.isfinite(array.astype(np.float64)).all():
        raise InvalidInput(f"input '{name}' holds NaN or infinity: JSON cannot carry them")
    values: list[Any] = array.ravel().tolist()
    return values


def decode_response(body: bytes, header_length: int | None, request: InferRequest) -> InferResponse:
    """Read the response to a request, with binary, JSON or shared-memory tensors.

    Raises:
        ProtocolError: The body does not follow the protocol.
    """
    if header_length is not None and header_length > len(body):
        raise ProtocolError(f"the response's header has {header_length} bytes, the response only {len(body)}")
    document = json_object(body if header_length is None else body[:header_length])
    if request.request_id and document.get("id", request.request_id) != request.request_id:
        raise ProtocolError(f"the response to request {request.request_id} has the id {str(document['id'])[:80]}")
    offset = len(body) if header_length is None else header_length
    outputs: dict[str, AnyArray] = {}
    shared: dict[str, tuple[int, ...]] = {}
    try:
        for output in document["outputs"]:
            name, datatype, shape = str(output["name"]), output["datatype"], tuple(map(int, output["shape"]))
            if "data" in output:
                outputs[name] = from_values(output["data"], datatype, shape)
            elif request.is_shared(name):
                shared[name] = shape
            else:
                size = int(output["parameters"]["binary_data_size"])
                outputs[name] = from_raw(_slice(body, offset, size), datatype, shape)
                offset += size
        version = str(document.get("model_version", ""))
        return InferResponse(model=str(document["model_name"]), version=version, outputs=outputs, shared_shapes=shared)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the response is malformed: {error!r}", body=str(document)[:500]) from error


def _slice(body: bytes, offset: int, size: int) -> memoryview:
    if size < 0 or offset + size > len(body):
        raise ProtocolError(f"the response ends after {len(body)} bytes, a tensor in it at {offset + size}")
    return memoryview(body)[offset : offset + size]


def parse_json(body: bytes) -> Any:
    """Parse the JSON of a response.

    Raises:
        ProtocolError: It is something else, or too large.
    """
    check_json(body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"the response is not JSON: {body[:80]!r}",
            hint="is it the HTTP port of a Triton server? Usually that is 8000",
        ) from error


def json_object(body: bytes) -> dict[str, Any]:
    """Parse the JSON object of a response.

    Raises:
        ProtocolError: It is something else.
    """
    document = parse_json(body)
    if not isinstance(document, dict):
        raise ProtocolError(f"the response is not a JSON object: {body[:80]!r}")
    return document


_BY_STATUS: dict[int, type[ClientError]] = {
    400: InvalidInput,
    401: Unauthorized,
    403: Unauthorized,
    404: ModelNotFound,
    408: DeadlineExceeded,
    429: Overloaded,
    499: DeadlineExceeded,
    502: ConnectionFailed,  # of the gateway to the server behind it
    503: ModelNotReady,
    504: ConnectionFailed,
}


def http_error(response: HttpResponse, request_id: str | None) -> ClientError:
    """One table from HTTP status to the error tree. Source: Triton's `HTTPAPIServer` status mapping; RFC 9110."""
    body = response.body[:_READ_BODY].decode("utf-8", "replace")
    page = _PAGE.match(body)
    try:
        reason = without_traceback(str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = page["title"] or body if page else body or "no reason given"
    kind = _BY_STATUS.get(response.status, ServerError)
    return kind(
        f"the server returned {response.status}: {bounded(reason)}",
        status=response.status,
        body=body[:_SHOWN_BODY],
        request_id=request_id,
        retry_after_s=_seconds(response.headers.get("Retry-After") or ""),
        hint=_NOT_TRITON if page else hint_for(kind, reason),
    )


def _seconds(text: str) -> float | None:
    """`Retry-After` in seconds; its other form, a date, is not worth a clock that both sides agree on."""
    return float(text) if text.isdecimal() else None
