"""`graphkiln openapi`: an OpenAPI 3.1 document of a model's own API, for generated clients and for people.

The document is KServe's v2 protocol, narrowed to the tensors of one model.

Source: OpenAPI 3.1.1; KServe's v2 protocol ("Open Inference Protocol") with Triton's extensions for binary tensors and
classification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from graphkiln.cli.console import print_json
from graphkiln.cli.options import ModelPath, local_path, read_any_version, version_folder
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.image_model import IMAGE_INPUT
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.images.formats import FORMATS
from graphkiln_client import DEFAULT_URL

if TYPE_CHECKING:
    from graphkiln_backend.graph.contract import Contract
    from graphkiln_backend.repository.config import ModelConfigProto

_Schema = dict[str, Any]

_JSON, _BYTES = "application/json", "application/octet-stream"
_HEADER_LENGTH = "Inference-Header-Content-Length"
_NOT_IN_JSON = (DType.FP16, DType.BF16)  # Triton reads and writes these as bytes only
_FLOATS = (DType.FP32, DType.FP64)

_BINARY = (
    "Triton's binary tensor extension: the JSON of the request, in which a tensor has `parameters.binary_data_size` in "
    f"place of `data`, then the bytes of these tensors; `{_HEADER_LENGTH}` is the length of the JSON. A length of 0 "
    "declares the whole body to be the only input"
)
_BINARY_RESPONSE = (
    f"The response as JSON, as many bytes as the header `{_HEADER_LENGTH}` says, then the bytes of the outputs in its "
    "order, little-endian"
)


def openapi(
    path: ModelPath,
    server: Annotated[
        str, typer.Option(help="Address of the server in the document, http or https.", metavar="URL")
    ] = DEFAULT_URL,
) -> None:
    """Print an OpenAPI 3.1 document of a model's HTTP API.

    Inputs and outputs with their types and shapes, preprocessing and labels, health and metadata; also NAME.images if
    the model accepts encoded images. STORE/NAME describes the newest version by paths without a version number.
    """
    from graphkiln.cli.lower import complete_version_config, open_artifact_cache
    from graphkiln_backend.repository.publication import complete_contract
    from graphkiln_backend.repository.version_folders import is_version
    from graphkiln_backend.server.image_models import find_taker

    _check_server(server)
    with local_path(path) as folder, open_artifact_cache("off") as artifacts:
        version = version_folder(folder).absolute()
        config = complete_version_config(version, artifacts)
        stored = read_any_version(version)
        contract = complete_contract(stored, config, version.parent)
        described = Described(
            config=config,
            image_config=find_taker(config),
            contract=contract,
            version=version.name,
            is_pinned=is_version(folder.absolute().name) or folder.is_file(),
            source=stored.manifest.provenance.source if stored.manifest else "",
        )
        print_json(describe(described, server.rstrip("/")))


def _check_server(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidInput(
            f"--server: expected http://HOST:PORT or https://HOST:PORT, got {url!r}",
            hint="OpenAPI describes HTTP; for gRPC, clients are generated from KServe's .proto file",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Described:
    """A version to describe.

    Attributes:
        config: Complete configuration of the model.
        image_config: Configuration of its image model; None without one.
        contract: Preprocessing, labels and task of the version.
        version: Number of the version.
        is_pinned: Whether paths name the version.
        source: Description of the source model; empty without a manifest.
    """

    config: ModelConfigProto
    image_config: ModelConfigProto | None
    contract: Contract
    version: str
    is_pinned: bool
    source: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """An input or output as requests have it.

    Attributes:
        shape: A size, or the least and the largest size, of each dimension; -1 for any.
        notes: Keys of the schema that say more of its data.
    """

    name: str
    dtype: DType
    shape: tuple[int | tuple[int, int], ...]
    notes: _Schema

    @property
    def in_json(self) -> bool:
        return self.dtype not in _NOT_IN_JSON


def describe(described: Described, server: str) -> _Schema:
    """Make the OpenAPI document of a model.

    Args:
        described: The version.
        server: Address of the server.
    """
    config, contract = described.config, described.contract
    outputs = [_tensor(row, config.max_batch_size, _output_notes(row.name, contract)) for row in config.output]
    inputs = [
        _tensor(row, config.max_batch_size, _input_notes(contract) if len(config.input) == 1 else {})
        for row in config.input
    ]
    schemas = _schemas(inputs, outputs, required=sum(not row.optional for row in config.input))
    paths = {**_server_paths(), **_model_paths(described, config.name, "")}
    paths[f"{_base(described, config.name)}/infer"] = {"post": _infer(inputs, outputs)}
    if described.image_config is not None:
        name = described.image_config.name
        paths |= _model_paths(described, name, "Image")
        paths[f"{_base(described, name)}/infer"] = {"post": _infer_image()}
    return {
        "openapi": "3.1.1",
        "info": {
            "title": config.name,
            "version": described.version,
            "summary": f"Inference with the model {config.name} by KServe's v2 protocol.",
            **({"description": f"Source of the model: {described.source}"} if described.source else {}),
            **({"x-task": encode(contract.task)} if contract.task else {}),
        },
        "servers": [{"url": server}],
        "paths": paths,
        "components": {"schemas": schemas, "responses": {"Failed": _failed()}},
    }


def _base(described: Described, name: str) -> str:
    return f"/v2/models/{name}" + (f"/versions/{described.version}" if described.is_pinned else "")


def _tensor(row: Any, max_batch_size: int, notes: _Schema) -> _Tensor:
    batch = ((1, max_batch_size),) if max_batch_size else ()
    return _Tensor(name=row.name, dtype=DType.from_config(row.data_type), shape=(*batch, *row.dims), notes=notes)


def _input_notes(contract: Contract) -> _Schema:
    spec = contract.preprocess
    if spec is None:
        return {}
    steps = (
        "pixels of images after the steps of `x-preprocess`: color, resize, crop or letterbox, scaling of 0..255 to "
    )
    steps += f"0..1, mean and std; {spec.color} as {spec.layout}"
    return {"description": steps, "x-preprocess": encode(spec)}


def _output_notes(name: str, contract: Contract) -> _Schema:
    if contract.labels and name == contract.output:
        return {
            "description": f"a score for each of {len(contract.labels)} classes, named by `x-labels`",
            "x-labels": [*contract.labels],
        }
    if contract.ranking and name in (contract.ranking.scores, contract.ranking.indices):
        what = "scores" if name == contract.ranking.scores else "indices"
        labels = {"x-labels": [*contract.ranking.labels]} if contract.ranking.labels and what == "indices" else {}
        return {"description": f"{what} of the best classes, best first", **labels}
    for key, value in encode(contract.task).items() if contract.task else ():
        if value == name and key != "kind":
            of_classes = key == "classes" or isinstance(contract.task, Segmentation)
            labels = {"x-labels": [*contract.labels]} if contract.labels and of_classes else {}
            return {"description": f"`{key}` of the task in `x-task`", **labels}
    return {}


def _schemas(inputs: Sequence[_Tensor], outputs: Sequence[_Tensor], *, required: int) -> _Schema:
    named = {f"Input{number}": _tensor_schema(tensor) for number, tensor in enumerate(inputs)}
    answers = {f"Output{number}": _tensor_schema(tensor) for number, tensor in enumerate(outputs)}
    metadata_tensor = {
        "name": {"type": "string"},
        "datatype": {"enum": [*DType]},
        "shape": {"type": "array", "items": {"type": "integer"}, "description": "-1: any size"},
    }
    request = {
        "inputs": {"type": "array", "minItems": required, "maxItems": len(inputs), "items": _any_of([*named])},
        "id": {"type": "string", "description": "Repeated in the response."},
        "outputs": {
            "type": "array", "items": _reference("RequestedOutput"), "description": "All outputs if left out."
        },
    }  # fmt: skip
    response = {
        "model_name": {"type": "string"},
        "model_version": {"type": "string"},
        "id": {"type": "string"},
        "outputs": {"type": "array", "items": _any_of([*answers, "Classes"])},
    }
    return {
        "Error": _object({"error": {"type": "string"}}),
        "Metadata": _metadata(),
        "MetadataTensor": _object(metadata_tensor),
        **named,
        "RequestedOutput": _requested_output(outputs),
        "InferRequest": _object(request, optional=("id", "outputs")),
        **answers,
        "Classes": _classes(outputs),
        "InferResponse": _object(response, optional=("id",)),
    }


def _tensor_schema(tensor: _Tensor) -> _Schema:
    shape = {
        "type": "array",
        "prefixItems": [_size(size) for size in tensor.shape],
        "minItems": len(tensor.shape),
        "maxItems": len(tensor.shape),
        "items": {"type": "integer"},
        "description": f"[{', '.join(map(_readable, tensor.shape))}]",
    }
    properties: _Schema = {
        "name": {"type": "string", "const": tensor.name},
        "datatype": {"type": "string", "const": str(tensor.dtype)},
        "shape": shape,
    }
    if tensor.in_json:
        elements = "All elements in row-major order."
        properties["data"] = {"type": "array", "items": _element(tensor.dtype), "description": elements}
    else:
        size = {
            "type": "integer",
            "minimum": 0,
            "description": "Bytes of all elements, in the binary part of the body.",
        }
        properties["parameters"] = _object({"binary_data_size": size})
    return {**_object(properties), **tensor.notes}


def _size(size: int | tuple[int, int]) -> _Schema:
    if isinstance(size, tuple):
        return {"type": "integer", "minimum": size[0], "maximum": size[1]}
    return {"type": "integer", "minimum": 0} if size < 0 else {"type": "integer", "minimum": size, "maximum": size}


def _readable(size: int | tuple[int, int]) -> str:
    if isinstance(size, tuple):
        return f"{size[0]} to {size[1]}"
    return "any" if size < 0 else str(size)


def _element(dtype: DType) -> _Schema:
    if dtype is DType.BOOL:
        return {"type": "boolean"}
    if dtype is DType.BYTES:
        return {"type": "string"}
    if dtype in _FLOATS:
        return {"type": "number"}
    bits = 8 * dtype.bytes
    signed = dtype.value.startswith("INT")
    least, most = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return {"type": "integer", "minimum": least, "maximum": most}


def _requested_output(outputs: Sequence[_Tensor]) -> _Schema:
    classification = {"type": "integer", "minimum": 1, "description": "Number of best classes to return as `Classes`."}
    binary = {"type": "boolean", "description": "Whether the output is in the binary part of the body."}
    parameters = _object(
        {"classification": classification, "binary_data": binary}, optional=("classification", "binary_data")
    )
    return _object(
        {"name": {"type": "string", "enum": [tensor.name for tensor in outputs]}, "parameters": parameters},
        optional=("parameters",),
    )


def _classes(outputs: Sequence[_Tensor]) -> _Schema:
    return {
        **_object(
            {
                "name": {"type": "string", "enum": [tensor.name for tensor in outputs]},
                "datatype": {"type": "string", "const": "BYTES"},
                "shape": {"type": "array", "items": {"type": "integer"}},
                "data": {"type": "array", "items": {"type": "string"}},
            }
        ),
        "description": "The best classes of an output that was requested with `classification`, best first: "
        "SCORE:INDEX:LABEL, or SCORE:INDEX without labels.",
    }


def _metadata() -> _Schema:
    tensors = {"type": "array", "items": _reference("MetadataTensor")}
    return _object(
        {
            "name": {"type": "string"},
            "versions": {"type": "array", "items": {"type": "string"}},
            "platform": {"type": "string"},
            "inputs": tensors,
            "outputs": tensors,
        }
    )


def _server_paths() -> _Schema:
    return {
        "/v2/health/live": {"get": _status("serverLive", "Whether the server runs.")},
        "/v2/health/ready": {"get": _status("serverReady", "Whether the server and all its models are ready.")},
    }


def _model_paths(described: Described, name: str, prefix: str) -> _Schema:
    found = {"description": "Metadata.", "content": {_JSON: {"schema": _reference("Metadata")}}}
    base, key = _base(described, name), prefix[:1].lower() + prefix[1:]
    metadata = {
        "operationId": f"{key}ModelMetadata" if key else "modelMetadata",
        "summary": f"Versions, inputs and outputs of {name}.",
        "responses": {"200": found, "4XX": {"$ref": "#/components/responses/Failed"}},
    }
    ready = _status(f"{key}ModelReady" if key else "modelReady", f"Whether {name} is ready.")
    return {base: {"get": metadata}, f"{base}/ready": {"get": ready}}


def _status(operation: str, summary: str) -> _Schema:
    responses = {"200": {"description": "Yes; no body."}, "4XX": {"description": "No."}}
    return {"operationId": operation, "summary": summary, "responses": responses}


def _infer(inputs: Sequence[_Tensor], outputs: Sequence[_Tensor]) -> _Schema:
    request: _Schema = {_BYTES: {"schema": {"type": "string", "format": "binary", "description": _BINARY}}}
    response: _Schema = {_BYTES: {"schema": {"type": "string", "format": "binary", "description": _BINARY_RESPONSE}}}
    if all(tensor.in_json for tensor in inputs):
        request = {_JSON: {"schema": _reference("InferRequest")}, **request}
    if any(tensor.in_json for tensor in outputs):
        response = {_JSON: {"schema": _reference("InferResponse")}, **response}
    return {
        "operationId": "infer",
        "summary": "Compute the outputs of a batch.",
        "parameters": [_length_header(required=False)],
        "requestBody": {"required": True, "content": request},
        "responses": _responses("The outputs.", response),
    }


def _infer_image() -> _Schema:
    image = {"type": "string", "format": "binary", "description": f"One image: {', '.join(FORMATS)}."}
    answer = {"schema": {"type": "string", "format": "binary", "description": _BINARY_RESPONSE}}
    return {
        "operationId": "inferImage",
        "summary": "Compute the outputs for an encoded image, which the server decodes and preprocesses.",
        "description": f"The image is the only element of the input `{IMAGE_INPUT}`.",
        "parameters": [_length_header(required=True)],
        "requestBody": {"required": True, "content": {_BYTES: {"schema": image}}},
        "responses": _responses("The outputs of the image, as `infer` describes them.", {_BYTES: answer}),
    }


def _length_header(*, required: bool) -> _Schema:
    schema: _Schema = {"type": "integer", "minimum": 0}
    if required:
        schema |= {"maximum": 0, "default": 0}
    what = "0: the body is the image." if required else f"Length of the JSON in a body of {_BYTES}."
    return {"name": _HEADER_LENGTH, "in": "header", "required": required, "description": what, "schema": schema}


def _responses(description: str, content: _Schema) -> _Schema:
    header = {"schema": {"type": "integer"}, "description": f"Length of the JSON in a body of {_BYTES}."}
    failed = {"$ref": "#/components/responses/Failed"}
    succeeded = {"description": description, "headers": {_HEADER_LENGTH: header}, "content": content}
    return {"200": succeeded, "4XX": failed, "5XX": failed}


def _failed() -> _Schema:
    error = {"schema": _reference("Error")}
    # Triton declares the same JSON as text where an instance refused the request.
    return {"description": "The request failed.", "content": {_JSON: error, "text/plain": error}}


def _object(properties: _Schema, optional: Sequence[str] = ()) -> _Schema:
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, **({"required": required} if required else {})}


def _reference(name: str) -> _Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _any_of(names: Sequence[str]) -> _Schema:
    references = [_reference(name) for name in names]
    return references[0] if len(references) == 1 else {"anyOf": references}
