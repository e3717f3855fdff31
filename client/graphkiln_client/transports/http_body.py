"""Bodies of KServe v2 over HTTP: tensors as bytes behind a JSON header, as JSON, or in shared memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.transports.base import (
    InferRequest,
    InferResponse,
    SharedTensor,
    Wanted,
    datatype_of,
    dtype_named,
    from_bytes,
    raw_buffer,
)


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
        row: dict[str, Any] = {"name": name, "datatype": datatype_of(name, array), "shape": list(array.shape)}
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
    """Reads the answer to a request, with binary, JSON or shared-memory tensors.

    Raises:
        ProtocolError: The body is not what the protocol promises.
    """
    if header_length is not None and header_length > len(body):
        raise ProtocolError(f"the answer's header has {header_length} bytes, the answer only {len(body)}")
    document = json_object(body if header_length is None else body[:header_length])
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


def parse_json(body: bytes) -> Any:
    """An answer's JSON.

    Raises:
        ProtocolError: It is none.
    """
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"the server's answer is not JSON: {body[:80]!r}") from error


def json_object(body: bytes) -> dict[str, Any]:
    """An answer's JSON object.

    Raises:
        ProtocolError: It is none.
    """
    document = parse_json(body)
    if not isinstance(document, dict):
        raise ProtocolError(f"the server's answer is not a JSON object: {body[:80]!r}")
    return document
