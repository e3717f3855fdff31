"""KServe v2 over HTTP: what the calls look like and how the answers read, with binary or JSON tensors."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from graphkiln.client.transports.base import (
    Call,
    InferRequest,
    InferResponse,
    SharedTensor,
    Wanted,
    datatype_of,
    dtype_named,
    from_bytes,
    raw_buffer,
)
from graphkiln.client.transports.endpoint import Compression
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
_COMPRESSION_LEVEL = 1  # the fastest: pixels and weights hardly shrink further
_SHOWN_BODY = 2000
_MOST_DIGITS = 19  # of a length: a 64-bit number


@dataclass(kw_only=True, slots=True)
class HttpMessage:
    """One HTTP request.

    Attributes:
        method: GET or POST.
        path: Path on the server, quoted.
        body: Buffers that make up the body, in order.
        headers: Beside those of the connection.
    """

    method: str
    path: str
    body: tuple[bytes | memoryview, ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)


class Headers(Protocol):
    """A response's headers, by name in any case."""

    def get(self, name: str, /) -> str | None:
        """The header's text, or None."""
        ...


@dataclass(kw_only=True, slots=True)
class HttpAnswer:
    """One HTTP response.

    Attributes:
        status: Status code.
        headers: Its headers.
        body: As it came, or decompressed.
    """

    status: int
    headers: Headers
    body: bytes


class HttpWire:
    """See `Wire`.

    Args:
        compression: How request bodies are compressed; answers are asked for in the same way.
    """

    def __init__(self, compression: Compression = "") -> None:
        self._compression = compression

    def ready(self) -> Call[bool]:
        """See `Wire.ready`."""
        return Call(HttpMessage(method="GET", path="/v2/health/ready"), _read_ready)

    def live(self) -> Call[bool]:
        """See `Wire.live`."""
        return Call(HttpMessage(method="GET", path="/v2/health/live"), _read_ready)

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
        return _document(_model_path(model, version) + "/stats")

    def repository_index(self) -> Call[list[dict[str, Any]]]:
        """See `Wire.repository_index`."""
        return Call(_post("/v2/repository/index"), _read_index)

    def load(self, model: str) -> Call[None]:
        """See `Wire.load`."""
        return Call(_post(f"/v2/repository/models/{quote(model, safe='')}/load"), _read_nothing)

    def unload(self, model: str) -> Call[None]:
        """See `Wire.unload`."""
        return Call(_post(f"/v2/repository/models/{quote(model, safe='')}/unload"), _read_nothing)

    def register_region(self, name: str, key: str, size_bytes: int) -> Call[None]:
        """See `Wire.register_region`."""
        body = json.dumps({"key": key, "offset": 0, "byte_size": size_bytes}).encode()
        return Call(_post(f"{_region_path(name)}/register", body), _read_nothing)

    def region_status(self, name: str) -> Call[None]:
        """See `Wire.region_status`."""
        return Call(HttpMessage(method="GET", path=f"{_region_path(name)}/status"), _read_nothing)

    def unregister_region(self, name: str) -> Call[None]:
        """See `Wire.unregister_region`."""
        return Call(_post(f"{_region_path(name)}/unregister"), _read_nothing)

    def infer(self, request: InferRequest, timeout_s: float, *, binary: bool) -> Call[InferResponse]:
        """See `Wire.infer`."""
        parts, header_length = encode_request(request, timeout_s, binary=binary)
        headers = {_HEADER_LENGTH: str(header_length)} if binary else {"Content-Type": "application/json"}
        if self._compression:
            parts = [_COMPRESS[self._compression](b"".join(parts))]
            headers |= {"Content-Encoding": self._compression, "Accept-Encoding": self._compression}
        path = _model_path(request.model, request.version) + "/infer"
        message = HttpMessage(method="POST", path=path, body=tuple(parts), headers=headers)
        return Call(message, lambda answer: _read_infer(answer, request))


_COMPRESS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, _COMPRESSION_LEVEL),
    "deflate": lambda data: zlib.compress(data, _COMPRESSION_LEVEL),
}
_DECOMPRESS: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}


def decompressed(body: bytes, encoding: str) -> bytes:
    """A response's body, whatever its `Content-Encoding`.

    Raises:
        ProtocolError: The encoding is unknown, or the body damaged.
    """
    if encoding in ("", "identity"):
        return body
    try:
        return _DECOMPRESS[encoding](body)
    except (KeyError, OSError, EOFError, zlib.error) as error:
        raise ProtocolError(f"the answer cannot be decompressed as {encoding}: {error}") from error


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
    inputs: list[dict[str, Any]] = []
    parts: list[bytes | memoryview] = [b""]
    for name, array in request.inputs.items():
        if isinstance(array, SharedTensor):
            inputs.append(_shared_input(name, array))
            continue
        row: dict[str, Any] = {"name": name, "datatype": datatype_of(name, array).value, "shape": list(array.shape)}
        if binary:
            raw = raw_buffer(array)
            parts.append(raw)
            row["parameters"] = {"binary_data_size": len(raw)}
        else:
            row["data"] = _json_data(name, array)
        inputs.append(row)
    header: dict[str, Any] = {"inputs": inputs}
    if request.request_id:
        header["id"] = request.request_id
    parameters: dict[str, Any] = {} if timeout_s is None else {"timeout": round(timeout_s * 1e6)}
    if request.outputs:
        header["outputs"] = [_wanted(name, wanted, binary=binary) for name, wanted in request.outputs.items()]
    elif binary:
        parameters["binary_data_output"] = True
    if parameters:
        header["parameters"] = parameters
    parts[0] = json.dumps(header, separators=(",", ":")).encode()
    return parts, len(parts[0])


def _shared_input(name: str, place: SharedTensor) -> dict[str, Any]:
    row = {"name": name, "datatype": place.datatype.value, "shape": list(place.shape)}
    return {**row, "parameters": _place(place)}


def _place(place: SharedTensor) -> dict[str, Any]:
    return {
        "shared_memory_region": place.region,
        "shared_memory_offset": place.offset,
        "shared_memory_byte_size": place.size_bytes,
    }


def _wanted(name: str, wanted: Wanted, *, binary: bool) -> dict[str, Any]:
    parameters: dict[str, Any] = _place(wanted.place) if wanted.place else {"binary_data": True} if binary else {}
    if wanted.classes:
        parameters["classification"] = wanted.classes
    return {"name": name, "parameters": parameters} if parameters else {"name": name}


def _json_data(name: str, array: AnyArray) -> list[Any]:
    """The elements as JSON values. Source: KServe v2, "Tensor Data": 16-bit floats have none."""
    dtype = datatype_of(name, array)
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
    """Reads the answer to a request, with binary, JSON or shared-memory tensors.

    Raises:
        ProtocolError: The body is not what the protocol promises.
    """
    if header_length is not None and header_length > len(body):
        raise ProtocolError(f"the answer's header has {header_length} bytes, the answer only {len(body)}")
    document = _json_object(body if header_length is None else body[:header_length])
    if request.request_id and document.get("id", request.request_id) != request.request_id:
        raise ProtocolError(f"asked with id {request.request_id}, answered with id {str(document['id'])[:80]}")
    offset = len(body) if header_length is None else header_length
    outputs: dict[str, AnyArray] = {}
    placed: dict[str, tuple[int, ...]] = {}
    try:
        for output in document["outputs"]:
            name, datatype, shape = str(output["name"]), output["datatype"], tuple(map(int, output["shape"]))
            if "data" in output:
                outputs[name] = _from_json(output["data"], datatype, shape)
            elif request.places(name):
                placed[name] = shape
            else:
                size = int(output["parameters"]["binary_data_size"])
                outputs[name] = from_bytes(_slice(body, offset, size), datatype, shape)
                offset += size
        version = str(document.get("model_version", ""))
        return InferResponse(model=str(document["model_name"]), version=version, outputs=outputs, placed=placed)
    except (KeyError, TypeError, AttributeError, ValueError, OverflowError) as error:
        raise ProtocolError(f"the server's answer lacks or spoils {error}", body=str(document)[:500]) from error


def _slice(body: bytes, offset: int, size: int) -> memoryview:
    if size < 0 or offset + size > len(body):
        raise ProtocolError(f"the answer ends after {len(body)} bytes, a tensor of it at {offset + size}")
    return memoryview(body)[offset : offset + size]


def _from_json(data: Any, datatype: str, shape: tuple[int, ...]) -> AnyArray:
    dtype = dtype_named(datatype)
    if any(size < 0 for size in shape):
        raise ProtocolError(f"a tensor of the answer has the shape {list(shape)}")
    try:
        if dtype is DType.BYTES:
            texts = np.asarray(data, np.object_).reshape(shape)
            return np.array([str(text).encode() for text in texts.ravel()], np.object_).reshape(shape)
        return np.asarray(data, dtype.numpy).reshape(shape)
    except (ValueError, TypeError, OverflowError) as error:
        raise ProtocolError(f"the answer's JSON is not a {datatype} tensor of shape {list(shape)}: {error}") from error


def _post(path: str, body: bytes = b"{}") -> HttpMessage:
    return HttpMessage(method="POST", path=path, body=(body,), headers={"Content-Type": "application/json"})


def _document(path: str) -> Call[dict[str, Any]]:
    return Call(HttpMessage(method="GET", path=path), lambda answer: _json_object(_succeeded(answer).body))


def _model_path(model: str, version: str) -> str:
    path = f"/v2/models/{quote(model, safe='')}"
    return f"{path}/versions/{quote(version, safe='')}" if version else path


def _region_path(name: str) -> str:
    return f"/v2/systemsharedmemory/region/{quote(name, safe='')}"


def _read_ready(answer: HttpAnswer) -> bool:
    """200 and 503 (or Triton's 400) are both answers to the question; a refusal of the question itself is an error."""
    if answer.status in (401, 403, 404, 429):
        raise http_error(answer, None)
    return answer.status == 200


def _read_nothing(answer: HttpAnswer) -> None:
    _succeeded(answer)


def _read_index(answer: HttpAnswer) -> list[dict[str, Any]]:
    rows = _json(_succeeded(answer).body)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ProtocolError(f"the server's index is not a list of models: {answer.body[:80]!r}")
    return rows


def _read_infer(answer: HttpAnswer, request: InferRequest) -> InferResponse:
    length = _succeeded(answer, request.request_id).headers.get(_HEADER_LENGTH) or ""
    plausible = length.isdecimal() and len(length) < _MOST_DIGITS
    return decode_response(answer.body, int(length) if plausible else None, request)


def _succeeded(answer: HttpAnswer, request_id: str | None = None) -> HttpAnswer:
    if answer.status != 200:
        raise http_error(answer, request_id)
    return answer


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
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
    502: ConnectionFailed,  # of the gateway to the server behind it
    503: ModelNotReady,
    504: ConnectionFailed,
}


def http_error(answer: HttpAnswer, request_id: str | None) -> ClientError:
    """One table from HTTP status to the error tree. Source: Triton's `HTTPAPIServer` status mapping; RFC 9110."""
    body = answer.body[:_SHOWN_BODY].decode("utf-8", "replace")
    try:
        words = str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError, RecursionError):
        words = body or "nothing more"
    kind = _BY_STATUS.get(answer.status, ServerError)
    return kind(
        f"the server answers {answer.status}: {words}",
        status=answer.status,
        body=body,
        request_id=request_id,
        retry_after_s=_seconds(answer.headers.get("Retry-After") or ""),
    )


def _seconds(text: str) -> float | None:
    """`Retry-After` in seconds; its other form, a date, is not worth a clock that both sides agree on."""
    return float(text) if text.isdecimal() else None
