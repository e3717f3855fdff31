"""Bodies of KServe v2 over HTTP: tensors as bytes behind a JSON header, as JSON, or in shared memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from graphkiln_backend.graph.contract import REQUEST_PARAMETER as CONTRACT
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.transports.base import (
    InferRequest,
    InferResponse,
    RequestedOutput,
    SharedTensor,
)
from graphkiln_client.transports.limits import check_json
from graphkiln_client.transports.tensors import datatype_of, from_raw, from_values, to_raw


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
    """Reads the response to a request, with binary, JSON or shared-memory tensors.

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
    """Parses the JSON of a response.

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
    """Parses the JSON object of a response.

    Raises:
        ProtocolError: It is something else.
    """
    document = parse_json(body)
    if not isinstance(document, dict):
        raise ProtocolError(f"the response is not a JSON object: {body[:80]!r}")
    return document
