"""KServe v2 over HTTP: encoding of requests and parsing of responses."""

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

from graphkiln_backend.graph.contract import PINNED_PARAMETER
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
    DOCUMENT_LIMIT,
    Call,
    InferRequest,
    InferResponse,
    RequestedOutput,
    SharedTensor,
    check_json,
    check_outputs,
    infer_limit,
)
from graphkiln_client.transports.endpoint import Compression, Endpoint, hint_for
from graphkiln_client.transports.tensors import datatype_of, from_raw, from_values, to_raw

_HEADER_LENGTH = "Inference-Header-Content-Length"
_HEADER_ENCODER = json.JSONEncoder(separators=(",", ":"))  # `json.dumps` would make one for each request
_COMPRESSION_LEVEL = 1  # fastest: higher levels hardly compress tensors further
_SHOWN_BODY = 2000
_READ_BODY = 1 << 16  # longer than any error message of a server
_MAX_LENGTH_DIGITS = 19  # a 64-bit number
_PAGE = re.compile(r"\s*<(?:!doctype html|html)\b(?:.*?<title[^>]*>\s*(?P<title>[^<]*?)\s*</title>)?", re.I | re.S)
_NOT_TRITON = "the response is an HTML page, which Triton never sends: check the URL, and any gateway in between"


@dataclass(kw_only=True, slots=True)
class HttpRequest:
    """One HTTP request.

    Attributes:
        headers: Headers in addition to those of the connection.
        is_admin: True if the request changes the server and needs its admin key.
        limit_bytes: Maximum size of the response's body in bytes.
    """

    method: str
    path: str
    body: tuple[bytes | memoryview, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    limit_bytes: int = DOCUMENT_LIMIT
    is_admin: bool = False

    def authorize(self, endpoint: Endpoint) -> HttpRequest:
        """Add the admin key."""
        return replace(self, headers={**self.headers, **endpoint.admin_headers()})


class Headers(Protocol):
    """Response headers with case-insensitive names."""

    def get(self, name: str, /) -> str | None:
        """Return the value of a header, or None."""
        ...


@dataclass(kw_only=True, slots=True)
class HttpResponse:
    """One HTTP response, with its body decompressed."""

    status: int
    headers: Headers
    body: bytes


class HttpWire:
    """See `Wire`.

    Args:
        compression: Compression of inference requests and responses.
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
    """Return True for status 200, False for 503 or Triton's 400; raise an error if the request was rejected."""
    if response.status in (401, 403, 404, 429):
        raise http_error(response, None)
    return response.status == 200


def _read_nothing(response: HttpResponse) -> None:
    _check(response)


def _read_index(response: HttpResponse) -> list[dict[str, Any]]:
    rows = parse_json(_check(response).body)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError(f"expected a list of models as the repository index, got {response.body[:80]!r}")
    return rows


def _read_infer(response: HttpResponse, request: InferRequest) -> InferResponse:
    length = _check(response, request.request_id).headers.get(_HEADER_LENGTH) or ""
    plausible = length.isdecimal() and len(length) < _MAX_LENGTH_DIGITS
    return decode_response(response.body, int(length) if plausible else None, request)


def _check(response: HttpResponse, request_id: str | None = None) -> HttpResponse:
    if response.status != 200:
        raise http_error(response, request_id)
    return response


def encode_request(
    request: InferRequest, timeout_s: float | None, *, binary: bool = True
) -> tuple[list[bytes | memoryview], int]:
    """Encode the body of an inference request.

    Returns:
        The parts of the body (JSON header, then the bytes of each input), and the length of the header in bytes.

    Raises:
        InvalidInput: An array cannot be sent.

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
    if request.version:
        parameters[PINNED_PARAMETER] = request.version
    if request.outputs:
        header["outputs"] = [_output_row(name, output, binary=binary) for name, output in request.outputs.items()]
    elif binary:
        parameters["binary_data_output"] = True
    if parameters:
        header["parameters"] = parameters
    parts[0] = _HEADER_ENCODER.encode(header).encode()
    return parts, len(parts[0])


def _input_row(
    name: str, tensor: AnyArray | SharedTensor, parts: list[bytes | memoryview], *, binary: bool
) -> dict[str, Any]:
    """Build an input's entry in the JSON header; append its bytes to `parts` if `binary` is set."""
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
    """Convert the elements to JSON values. Source: KServe v2, "Tensor Data", which excludes 16-bit floats."""
    dtype = DType(datatype_of(name, array))
    if dtype in (DType.FP16, DType.BF16):
        raise InvalidInput(f"input '{name}' is {dtype}, which the server's JSON protocol does not support")
    try:
        if dtype is DType.BYTES:
            return [text.decode() if isinstance(text, bytes) else str(text) for text in array.ravel().tolist()]
    except UnicodeDecodeError as error:
        raise InvalidInput(f"input '{name}' contains bytes that are not UTF-8, which JSON does not support") from error
    if dtype.is_float and not np.isfinite(array.astype(np.float64)).all():
        raise InvalidInput(f"input '{name}' contains NaN or infinity, which JSON does not support")
    values: list[Any] = array.ravel().tolist()
    return values


def decode_response(body: bytes, header_length: int | None, request: InferRequest) -> InferResponse:
    """Parse the response to an inference request, with tensors in binary form, in JSON or in shared memory.

    Raises:
        ProtocolError: The body is malformed.
    """
    if header_length is not None and header_length > len(body):
        raise ProtocolError(f"the response has {len(body)} bytes, its header declares {header_length} bytes")
    document = json_object(body if header_length is None else body[:header_length])
    if request.request_id and (document.get("id") or request.request_id) != request.request_id:
        raise ProtocolError(f"the response to request {request.request_id} has the id {str(document['id'])[:80]}")
    offset = len(body) if header_length is None else header_length
    outputs: dict[str, AnyArray] = {}
    shared: dict[str, tuple[int, ...]] = {}
    try:
        for output in document["outputs"]:
            name, datatype, shape = str(output["name"]), output["datatype"], tuple(map(int, output["shape"]))
            if "data" in output:
                outputs[name] = from_values(output["data"], datatype, shape)
            elif request.is_shared(name, datatype) and "binary_data_size" not in output.get("parameters", {}):
                shared[name] = shape
            else:
                size = int(output["parameters"]["binary_data_size"])
                outputs[name] = from_raw(_slice(body, offset, size), datatype, shape)
                offset += size
        if not outputs or len(outputs) != len(document["outputs"]) or outputs.keys() != request.outputs.keys():
            check_outputs([str(output["name"]) for output in document["outputs"]], request)
        version = str(document.get("model_version", ""))
        return InferResponse(model=str(document["model_name"]), version=version, outputs=outputs, shared_shapes=shared)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the response is malformed: {error!r}", body=str(document)[:500]) from error


def _slice(body: bytes, offset: int, size: int) -> memoryview:
    if size < 0 or offset + size > len(body):
        raise ProtocolError(f"the response ends after {len(body)} bytes, but a tensor ends at {offset + size}")
    return memoryview(body)[offset : offset + size]


def parse_json(body: bytes) -> Any:
    """Parse a JSON response.

    Raises:
        ProtocolError: The body is not JSON, or too large.
    """
    check_json(body)
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(
            f"the response is not JSON: {body[:80]!r}",
            hint="check that this is the HTTP port of a Triton server, usually 8000",
        ) from error


def json_object(body: bytes) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        ProtocolError: The body is not a JSON object.
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
    502: ConnectionFailed,  # a gateway cannot reach the server
    503: ModelNotReady,
    504: ConnectionFailed,
}


def http_error(response: HttpResponse, request_id: str | None) -> ClientError:
    """Convert an error response to an exception. Source: Triton's `HTTPAPIServer` status mapping; RFC 9110."""
    body = response.body[:_READ_BODY].decode("utf-8", "replace")
    page = _PAGE.match(body)
    try:
        reason = without_traceback(str(json.loads(body)["error"]))
    except (ValueError, KeyError, TypeError, RecursionError):
        reason = page["title"] or body if page else body or "no reason given"
    kind = _BY_STATUS.get(response.status, ServerError)
    retry_after = response.headers.get("Retry-After") or ""
    return kind(
        f"the server returned {response.status}: {bounded(reason)}",
        status=response.status,
        body=body[:_SHOWN_BODY],
        request_id=request_id,
        # A date is ignored, because the clocks may differ.
        retry_after_s=float(retry_after) if retry_after.isdecimal() else None,
        hint=_NOT_TRITON if page else hint_for(kind, reason),
    )
