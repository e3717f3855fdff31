"""Read config.pbtxt as Triton's protobuf, complete it from the signature of the graph, and write it.

The rest of the project reads a configuration through `repository.model_config.ModelConfig`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from functools import lru_cache
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from google.protobuf import json_format, text_format

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import read_text
from graphkiln_backend.graph.preprocess import PREPROCESS
from graphkiln_backend.graph.signature import BATCH, Signature, TensorSpec, free_dim
from graphkiln_backend.graph.task import RANKING, TASK, class_output
from graphkiln_backend.repository.batch_tensors import (
    SequenceTensors,
    check_batch_tensors,
    check_sequence_tensors,
    read_batch_tensors,
    read_sequence_tensors,
    refuse_text_id,
)

# Triton's protobuf messages, imported without gRPC, which `tritonclient.grpc` would load: 0.1 s and 20 MB for each
# instance process.

__all__ = ["pb"]

_NAME = "tritonclient.grpc.model_config_pb2"


def _load() -> ModuleType:
    """Import the module under its real name, so that a later import of the whole package gets the same one.

    Raises:
        ImportError: tritonclient is not installed.
    """
    if _NAME in sys.modules:
        return sys.modules[_NAME]
    package = find_spec("tritonclient")
    folders = package.submodule_search_locations if package else None
    if not folders:
        raise ModuleNotFoundError("No module named 'tritonclient'", name="tritonclient")
    spec = spec_from_file_location(_NAME, Path(folders[0]) / "grpc" / "model_config_pb2.py")
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot import {_NAME}", name=_NAME)
    module = module_from_spec(spec)
    sys.modules[_NAME] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[_NAME]
        raise
    return module


if TYPE_CHECKING:
    from tritonclient.grpc import model_config_pb2 as pb
else:
    pb = _load()


BACKEND = "graphkiln"
DROP_IN_BACKEND = "onnxruntime"
DROP_IN_PLATFORM = "onnxruntime_onnx"
# Triton refuses others, and lists their models neither as loading nor as failed. Source: its core, `constants.h`.
PLATFORMS = (
    "ensemble",
    DROP_IN_PLATFORM,
    "pytorch_libtorch",
    "tensorflow_graphdef",
    "tensorflow_savedmodel",
    "tensorrt_plan",
)
ONEFLOW_BACKEND = "oneflow"
OPENVINO_BACKEND = "openvino"

# Parameter of a configuration that `serve` gives to Triton's C++ backend in place of graphkiln's (`lowering.seat`).
SEAT, NATIVE = "seat", "native"

# Parameter of the configuration of a rollout's candidate that answers no user: it takes the processor time that nothing
# else needs.
IDLE_CORES = "idle_cores"

# For a batchable graph whose config.pbtxt names none. Source: Triton's `default-max-batch-size`.
DEFAULT_MAX_BATCH_SIZE = 4

# Triton's protobuf of a model configuration: untyped, so it stays in this package.
ModelConfigProto: TypeAlias = pb.ModelConfig

_COMPLETED_FIELDS = ("max_batch_size", "input", "output", "dynamic_batching")


def read_config(path: Path) -> ModelConfigProto:
    """Parse a config.pbtxt; a missing file is an empty configuration.

    Raises:
        RepositoryError: The file cannot be read or is not a model configuration; the message holds the line and field.
    """
    if not path.exists():
        return pb.ModelConfig()
    try:
        text = read_text(path).removeprefix("\ufeff")  # byte order mark of some Windows editors
        config = _parse(text)
    except (text_format.ParseError, UnicodeDecodeError, RecursionError) as error:
        raise RepositoryError(f"{path} is not a model configuration: {error}") from error
    except OSError as error:
        raise RepositoryError(f"cannot read {path}: {error}") from error
    copied = pb.ModelConfig()
    copied.CopyFrom(config)
    return copied


@lru_cache(maxsize=256)  # parsing takes a millisecond, and a start reads each configuration several times
def _parse(text: str) -> ModelConfigProto:
    return text_format.Parse(text, pb.ModelConfig())


def parse_json(text: str) -> ModelConfigProto:
    """Parse a configuration as Triton hands it to a Python backend: JSON with the protobuf's own field names.

    Unknown fields are ignored, since the server may be newer than the protobuf.

    Raises:
        RepositoryError: The text is not a model configuration.
    """
    try:
        return json_format.Parse(text, pb.ModelConfig(), ignore_unknown_fields=True)
    except json_format.ParseError as error:
        raise RepositoryError(f"the JSON is not a model configuration: {error}") from error


def write_config(config: ModelConfigProto, path: Path) -> None:
    """Write a config.pbtxt.

    Raises:
        OSError: The file cannot be written.
    """
    path.write_text(text_format.MessageToString(config))


def config_text(
    name: str,
    signature: Signature,
    *,
    max_batch_size: int,
    labels_file: str | None,
    contract: Contract | None = None,
) -> str:
    """Make the config.pbtxt of a saved graph.

    Args:
        name: Model name.
        signature: Inputs and outputs; each with a varying first dimension when `max_batch_size` is above 0.
        max_batch_size: Largest batch that Triton may form; 0 for a graph that cannot be batched.
        labels_file: File in the model's folder with one label per line, for the first output.
        contract: Preprocessing, ranking and task to publish for clients.

    Returns:
        The text of a complete configuration.
    """
    config = pb.ModelConfig(name=name, backend=BACKEND, max_batch_size=max_batch_size)
    if not max_batch_size:  # dims are explicit: `complete` would otherwise enable batching for dynamic dimensions
        _complete_tensors(config, "input", signature.inputs, signature.optional_inputs, batched=False)
        _complete_tensors(config, "output", signature.outputs, (), batched=False)
    complete(config, signature, labels_file=labels_file)
    if max_batch_size > 0:
        _add_warmup(config)
    contract = contract or Contract()
    for key, value in ((PREPROCESS, contract.preprocess), (RANKING, contract.ranking), (TASK, contract.task)):
        if value:
            config.parameters[key].string_value = encode_json(value)
    return text_format.MessageToString(config)


def configured_signature(config: ModelConfigProto) -> Signature | None:
    """Return the signature of a graph as config.pbtxt states it, for graphs that only their backend reads.

    None if the configuration leaves tensors, types or dims to the backend.

    Raises:
        ManifestError: A data type is not known.
    """
    tensors = (*config.input, *config.output)
    if not (config.input and config.output and all(tensor.data_type and tensor.dims for tensor in tensors)):
        return None
    batched = config.max_batch_size > 0
    return Signature(
        inputs=tuple(_configured_spec(tensor, batched=batched) for tensor in config.input if not tensor.optional),
        outputs=tuple(_configured_spec(tensor, batched=batched) for tensor in config.output),
        optional_inputs=tuple(_configured_spec(tensor, batched=batched) for tensor in config.input if tensor.optional),
    )


def _configured_spec(tensor: Any, *, batched: bool) -> TensorSpec:
    sizes = tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims
    first = (BATCH,) if batched else ()
    dims = (size if size >= 0 else free_dim(tensor.name, axis) for axis, size in enumerate(sizes, len(first)))
    return TensorSpec(name=tensor.name, dtype=DType.from_config(tensor.data_type), shape=(*first, *dims))


def complete(config: ModelConfigProto, signature: Signature, *, labels_file: str | None) -> None:
    """Fill in missing fields of a configuration and check the others against the graph.

    Completes names, data types, dims, `max_batch_size` (for graphs whose inputs and outputs all have a varying
    first dimension), dynamic batching, reshapes for scalars, and the labels of the first output.

    Args:
        config: Changed in place.
        signature: Signature of the graph.
        labels_file: File in the model's folder with one label per line, or None.

    Raises:
        RepositoryError: The configuration contradicts the graph; the message states the expected and the actual value.
    """
    refuse_response_cache(config)
    if config.max_batch_size == 0 and signature.varies and _omits_batch(config, signature):
        config.max_batch_size = DEFAULT_MAX_BATCH_SIZE
    batched = config.max_batch_size > 0
    signature = _check_provided(config, signature)
    optional = {spec.name for spec in signature.optional_inputs}
    for tensor in config.input:
        tensor.optional |= tensor.name in optional
    _complete_tensors(config, "input", signature.inputs, signature.optional_inputs, batched=batched)
    _complete_tensors(config, "output", signature.outputs, (), batched=batched)
    _check_all_inputs(config, signature)
    if labels_file and not any(output.label_filename for output in config.output):
        named = signature.outputs[class_output(signature)].name
        others = config.output[0]  # config.pbtxt may leave that output out
        next((output for output in config.output if output.name == named), others).label_filename = labels_file
    if config.max_batch_size > 1 and config.WhichOneof("scheduling_choice") is None:
        config.dynamic_batching.SetInParent()


def refuse_response_cache(config: ModelConfigProto) -> None:
    """Refuse Triton's response cache, whose key has neither the requested outputs nor the parameters (24.10).

    Raises:
        RepositoryError: The configuration requests it.
    """
    if config.response_cache.enable:
        raise RepositoryError(
            f"config.pbtxt of '{config.name}' requests response_cache, which gives wrong answers: it keeps errors as "
            "empty responses and the answers of replaced weights, and ignores which outputs a request asks for",
            hint="leave response_cache out, and cache in front of the server if requests repeat: by model, version, "
            "inputs, outputs and parameters",
        )


def complete_dictionary(config: dict[str, Any], signature: Signature, *, labels_file: str | None) -> None:
    """`complete` for the live dictionary that Triton hands to a Python backend's auto-completion.

    Args:
        config: The protobuf as a dictionary with its own field names; changed in place.
        signature: Signature of the graph.
        labels_file: File in the model's folder with one label per line, or None.

    Raises:
        RepositoryError: The configuration contradicts the graph.
    """
    message = json_format.ParseDict(config, pb.ModelConfig(), ignore_unknown_fields=True)
    refuse_text_id(message)
    complete(message, signature, labels_file=labels_file)
    completed = json_format.MessageToDict(message, preserving_proto_field_name=True)
    for field in _COMPLETED_FIELDS:
        if field in completed:
            config[field] = completed[field]


def _check_provided(config: ModelConfigProto, signature: Signature) -> Signature:
    """Check the tensors that the server provides for each request; returns the signature of the requests themselves.

    States are outputs for those that name them.
    """
    check_sequence_tensors(config, signature)
    tensors = read_batch_tensors(config).of_graph(signature)
    if tensors:
        check_batch_tensors(config, signature, tensors)
    if config.max_batch_size > 0:
        _check_batch(config, tensors.of_rows(signature))
    sequence = read_sequence_tensors(config) or SequenceTensors()
    return sequence.of_requests(tensors.of_requests(signature), {tensor.name for tensor in config.output})


def _omits_batch(config: ModelConfigProto, signature: Signature) -> bool:
    """Return true where dims in the configuration omit the batch dimension, or are missing and the graph has one.

    Source: Triton ONNX Runtime backend, auto-completion of `max_batch_size`.
    """
    ranks = {spec.name: len(spec.shape) for spec in (*signature.inputs, *signature.outputs)}
    named = [tensor for tensor in (*config.input, *config.output) if tensor.dims]
    if not named:
        return signature.batchable
    # A batch of scalars is written as dims [1]: Triton has no empty dims.
    return all(
        len(tensor.dims) == ranks.get(tensor.name, 0) - 1 or (ranks.get(tensor.name) == 1 and tensor.dims[0] == 1)
        for tensor in named
    )


def _check_batch(config: ModelConfigProto, signature: Signature) -> None:
    """Refuse batches of a graph that takes none, as Triton's C++ backend does: a fixed one cannot be cut or filled up.

    A row of it might be computed from its neighbors.
    """
    for spec in (spec for spec in (*signature.inputs, *signature.outputs) if not spec.shape):
        raise RepositoryError(
            f"max_batch_size is {config.max_batch_size}, but tensor {spec} has no batch dimension",
            hint="set max_batch_size: 0, or convert the model with a dynamic batch",
        )
    if not signature.varies:
        shapes = ", ".join(map(str, (*signature.inputs, *signature.outputs)))
        fixed = signature.fixed_batch
        lacking = "no common batch dimension" if fixed is None else f"a fixed batch of {fixed}"
        raise RepositoryError(
            f"max_batch_size is {config.max_batch_size}, but the graph has {lacking}: {shapes}",
            hint="set max_batch_size: 0 and write dims with all dimensions, or let the batch vary: "
            "graphkiln convert FILE.onnx",
        )


def _complete_tensors(
    config: ModelConfigProto,
    kind: Literal["input", "output"],
    specs: tuple[TensorSpec, ...],
    optional: tuple[TensorSpec, ...],
    *,
    batched: bool,
) -> None:
    tensors = config.input if kind == "input" else config.output
    if not tensors:
        for spec in specs:
            tensors.add(name=spec.name)
    by_name = {spec.name: spec for spec in (*specs, *optional)}
    for tensor in tensors:
        if tensor.name not in by_name:
            raise RepositoryError(
                f"config.pbtxt: {kind} '{tensor.name}' is not in the graph of '{config.name}'",
                hint=f"the graph has {', '.join(map(str, specs))}",
            )
        _complete_tensor(tensor, by_name[tensor.name], kind, batched=batched)


def _complete_tensor(tensor: Any, spec: TensorSpec, kind: str, *, batched: bool) -> None:
    data_type = int(pb.DataType.Value(spec.dtype.config_name))
    tensor.data_type = tensor.data_type or data_type
    shape = spec.shape[1:] if batched else spec.shape
    dims = [dim if isinstance(dim, int) and dim else -1 for dim in shape]  # Triton does not support sizes of 0
    if not spec.has_rank:
        if kind == "input" and not tensor.dims:
            raise RepositoryError(
                f"the graph does not say how many dimensions input '{tensor.name}' has: write its dims"
            )
        dims = list(tensor.dims) or [-1]
    if not tensor.dims:
        tensor.dims.extend(dims or [1])
        if not dims and batched:
            tensor.reshape.SetInParent()  # Triton has no scalars: [1] outside, [] inside
    if tensor.data_type != data_type:
        raise _mismatch(tensor, kind, "data type", spec.dtype.config_name, str(pb.DataType.Name(tensor.data_type)))
    given = list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
    if batched and given[:1] == [1] and len(given) == len(dims) + 1:
        del given[0]  # added by `guard_batch` already
    if not spec.shape and given == [1]:
        return  # not batched, Triton allows no empty reshape: the backend turns [1] into [] itself
    if len(given) != len(dims) or any(model not in (-1, named) for model, named in zip(dims, given, strict=True)):
        raise _mismatch(tensor, kind, f"dims{' (without the batch)' if batched else ''}", str(dims), str(given))


def _mismatch(tensor: Any, kind: str, what: str, expected: str, got: str) -> RepositoryError:
    return RepositoryError(
        f"config.pbtxt: {what} of {kind} '{tensor.name}' do not fit the graph: expected {expected}, got {got}",
        hint=f"correct them, or leave the {kind} out: it is completed from the graph",
    )


def _check_all_inputs(config: ModelConfigProto, signature: Signature) -> None:
    given = {tensor.name for tensor in config.input}
    missing = [str(spec) for spec in signature.inputs if spec.name not in given]
    if missing:
        raise RepositoryError(
            f"config.pbtxt of '{config.name}' omits inputs of the graph: {', '.join(missing)}",
            hint="name all inputs or none",
        )


def _add_warmup(config: ModelConfigProto) -> None:
    """Make Triton send itself a sample before it is ready: the first request is slow all the way through Triton."""
    if any(dim < 0 for tensor in config.input for dim in tensor.dims):
        return  # no valid size is known
    if any(tensor.data_type == pb.DataType.TYPE_STRING for tensor in config.input):
        return  # an empty string may be invalid input
    warmup = config.model_warmup.add(name="one sample", batch_size=1, count=1)
    for tensor in config.input:
        warmup.inputs[tensor.name].data_type = tensor.data_type
        warmup.inputs[tensor.name].dims.extend(tensor.dims)
        warmup.inputs[tensor.name].zero_data = True


def select_versions(config: ModelConfigProto, versions: Iterable[int]) -> list[int]:
    """Select the versions to serve, in ascending order. Source: Triton, "Model Configuration", version policy.

    Args:
        config: The model's configuration; without a policy, the newest version is served.
        versions: Available versions.
    """
    ordered = sorted(versions)
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return ordered
        case "specific":
            return [version for version in ordered if version in set(policy.specific.versions)]
        case _:
            return ordered[-max(1, policy.latest.num_versions) :]


# Triton (24.10) keeps the batch size of a request in 32 bits: a shape that begins with 2^32 is a request of 0 rows
# without a batch dimension. The dynamic batcher counts it as one row; the Python backend takes its next dimension for
# the rows and refuses the whole batch, or never responds where that dimension is 0. With a dimension of 1 in that place
# both count one row, and the request alone is refused, for a missing dimension. `reshape` changes only what the backend
# receives, so clients do not notice.
# Source: Triton core, `InferenceRequest::Normalize` and `DynamicBatchScheduler::GetDynamicBatch`; Triton Python
# backend, `ModelInstanceState::ProcessRequests`.


def guard_batch(config: ModelConfigProto) -> None:
    """Add a dimension of 1 after the batch to every input of a batched model that needs it.

    Args:
        config: Complete; changed in place.
    """
    if config.max_batch_size < 1:
        return
    for tensor in config.input:
        shape = list(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
        if shape[:1] == [1] or (tensor.optional and not shape):  # an optional scalar is not a row of a batch
            continue
        tensor.reshape.shape[:] = [1, *shape]
