"""Configuration of an image model, which decodes images for a tensor model: one input, the same outputs."""

from __future__ import annotations

from graphkiln_backend.graph.contract import CONTRACTS, Contracts
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.image_model import (
    ACCEPT_IMAGES,
    IMAGE_INPUT,
    IMAGE_MODEL,
    IMAGE_SAMPLE_BYTES,
    TENSOR_MODEL,
    image_model_name,
)
from graphkiln_backend.graph.preprocess import PREPROCESS
from graphkiln_backend.graph.task import RANKING, TASK
from graphkiln_backend.repository.config import ModelConfigProto, pb
from graphkiln_backend.repository.model_config import ModelConfig, tensor_bytes

# Dimensions of one image: height, width and channels.
_IMAGE_DIMS = 3
_PASSED_ON = (CONTRACTS, PREPROCESS, RANKING, TASK)
_RANK = "tensor_rank"
_PARTS = "tensor_parts"

# Parameter of an image model: name of the input of the tensor model.
TENSOR_INPUT = "tensor_input"


def image_config(tensor_model: ModelConfigProto, *, instances: int, has_gpu: bool = False) -> ModelConfigProto:
    """Make the configuration of the image model of a tensor model.

    Args:
        tensor_model: Complete configuration of the tensor model, including the published contracts.
        instances: Number of decoding processes.
        has_gpu: Whether Triton finds a GPU on the machine.

    Raises:
        RepositoryError: The tensor model publishes no preprocessing, or its input does not have the dims of an image.
    """
    _check(tensor_model)
    config = pb.ModelConfig(
        name=image_model_name(tensor_model.name), backend="python", max_batch_size=tensor_model.max_batch_size
    )
    batched = tensor_model.max_batch_size > 0
    dims = list(tensor_model.input[0].dims)
    images = dims[0] if not batched and len(dims) > _IMAGE_DIMS else 1  # -1 for any number
    config.input.add(name=IMAGE_INPUT, data_type=pb.TYPE_STRING, dims=[images])
    config.output.extend(tensor_model.output)
    config.version_policy.CopyFrom(tensor_model.version_policy)
    if tensor_model.max_batch_size > 1:
        config.dynamic_batching.SetInParent()
    config.instance_group.add(kind=pb.ModelInstanceGroup.KIND_CPU, count=instances)
    for key in _PASSED_ON:
        if key in tensor_model.parameters:
            config.parameters[key].string_value = tensor_model.parameters[key].string_value
    config.parameters[TENSOR_MODEL].string_value = tensor_model.name
    config.parameters[TENSOR_INPUT].string_value = tensor_model.input[0].name
    # One part for each CPU instance, since a single large batch would leave the others idle; one part on a GPU.
    read = ModelConfig.from_protobuf(tensor_model, has_gpu=has_gpu)
    parts = read.instances if all(group.device == CPU for group in read.instance_groups) else 1
    config.parameters[_PARTS].string_value = str(parts)
    config.parameters[_RANK].string_value = str(len(tensor_model.input[0].dims) + batched)
    config.parameters[IMAGE_SAMPLE_BYTES].string_value = str(tensor_bytes(tensor_model.input[0]))
    return config


def publish_image_model(config: ModelConfigProto) -> None:
    """Publish the name of the image model in the configuration of its tensor model."""
    config.parameters[IMAGE_MODEL].string_value = image_model_name(config.name)


def is_stacked(config: ModelConfigProto) -> bool:
    """Return true if the tensor model accepts several images in one request.

    Args:
        config: Configuration of the image model.
    """
    return int(config.parameters[_RANK].string_value) > _IMAGE_DIMS


def parts_of(config: ModelConfigProto) -> int:
    """Number of requests into which a batch of waiting images is split for the tensor model."""
    return int(config.parameters[_PARTS].string_value)


def _check(config: ModelConfigProto) -> None:
    where = f"parameters: {ACCEPT_IMAGES} of '{config.name}'"
    if config.HasField("sequence_batching"):
        raise RepositoryError(
            f"{where}: models with sequence batching do not support encoded images", hint=f"remove {ACCEPT_IMAGES}"
        )
    if len(config.input) != 1 or config.batch_input:
        raise RepositoryError(
            f"{where}: expected a model with one input, got {len(config.input) + len(config.batch_input)}"
        )
    if PREPROCESS not in config.parameters and not _all_have_preprocess(config):
        raise RepositoryError(
            f"{where}: the model has no preprocessing",
            hint="convert the model with --preprocess, or give the spec as parameters: preprocess",
        )
    # Without batching, a leading dimension may count images.
    ranks = {_IMAGE_DIMS} if config.max_batch_size > 0 else {_IMAGE_DIMS, _IMAGE_DIMS + 1}
    if len(config.input[0].dims) not in ranks:
        raise RepositoryError(f"{where}: input '{config.input[0].name}' does not have the dims of an image")


def _all_have_preprocess(config: ModelConfigProto) -> bool:
    """Return true if the contracts of all versions have a preprocessing."""
    if CONTRACTS not in config.parameters:
        return False
    contracts = Contracts.from_json(config.parameters[CONTRACTS].string_value)
    return all(contract.preprocess for contract in contracts.contracts.values())
