"""The model configuration used by the project: config.pbtxt with Triton's own default values.

Triton completes a configuration before an instance starts: the number of instances, their kind of device, the batch
sizes that its scheduler forms. The command line needs the same values without a server, so the rules are implemented
here, for both the file and the protobuf that `parse_json` reads in a Python backend.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.image_model import IMAGE_SAMPLE_BYTES
from graphkiln_backend.repository.config import DROP_IN_BACKEND, ModelConfigProto, read_config

# CPU instances of a group without a count; other backends have one. Source: Triton core,
# `SetDefaultInstanceCount`.
_DEFAULT_CPU_INSTANCES = {DROP_IN_BACKEND: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceGroup:
    """Instances of a model on one kind of device.

    Attributes:
        count: Number of instances, on each GPU if the group names several.
        device: Device of the first instance; None for KIND_MODEL.
        gpus: Numbers of the GPUs of the group.
    """

    count: int
    device: Device | None
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """An entry of `optimization.execution_accelerators`.

    Attributes:
        name: Such as `tensorrt`, `cuda` or `openvino`.
        parameters: Its options, unchanged.
    """

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A model's configuration with Triton's default values.

    Attributes:
        name: Name of the model.
        backend: Name of the backend that serves it.
        platform: Triton's older name for the backend.
        max_batch_size: Largest batch that Triton may form; 0 for a model without a batch dimension.
        preferred_batch_sizes: Sizes that the dynamic batcher prefers; None without a dynamic batcher.
        instance_groups: At least one.
        parameters: The `string_value` of each, by key, in alphabetical order.
        default_model_filename: File name of the graph; empty for `model.onnx`.
        gpu_accelerators: Execution accelerators of GPU instances, in the order of preference.
        cpu_accelerators: Execution accelerators of CPU instances, in the order of preference.
        graph_level: `optimization.graph.level`, unchanged.
        row_bytes: Bytes of one row of all inputs and outputs. Dynamic dimensions count as 1, strings as 0.
            For an image model the decoded sample is included.
        input_ranks: Number of dimensions of each input of an instance, with the batch.
        op_libraries: Libraries of custom operators, unchanged.
        decoupled: Whether a request may have any number of responses.
    """

    name: str = ""
    backend: str = ""
    platform: str = ""
    max_batch_size: int = 0
    preferred_batch_sizes: tuple[int, ...] | None = None
    instance_groups: tuple[InstanceGroup, ...] = (InstanceGroup(count=1, device=CPU),)
    parameters: Mapping[str, str] = field(default_factory=dict)
    default_model_filename: str = ""
    gpu_accelerators: tuple[Accelerator, ...] = ()
    cpu_accelerators: tuple[Accelerator, ...] = ()
    graph_level: int = 0
    row_bytes: int = 0
    input_ranks: Mapping[str, int] = field(default_factory=dict)
    op_libraries: tuple[str, ...] = ()
    decoupled: bool = False

    @classmethod
    def read(cls, path: Path, *, has_gpu: bool) -> ModelConfig:
        """Read a config.pbtxt; a missing file is an empty configuration.

        Args:
            path: The file.
            has_gpu: As for `from_protobuf`.

        Raises:
            RepositoryError: The text is not a model configuration; the message holds the line and the field.
        """
        return cls.from_protobuf(read_config(path), has_gpu=has_gpu)

    @classmethod
    def from_protobuf(cls, config: ModelConfigProto, *, has_gpu: bool) -> ModelConfig:
        """Read Triton's `ModelConfig` message.

        Args:
            config: The message; not changed.
            has_gpu: Whether Triton finds a GPU for instances of KIND_AUTO.
        """
        accelerators = config.optimization.execution_accelerators
        batching = config.dynamic_batching if config.HasField("dynamic_batching") else None
        groups = [_instance_group(group, config.backend, has_gpu=has_gpu) for group in config.instance_group]
        return cls(
            name=config.name,
            backend=config.backend,
            platform=config.platform,
            max_batch_size=config.max_batch_size,
            preferred_batch_sizes=None if batching is None else tuple(batching.preferred_batch_size),
            instance_groups=tuple(groups) or (_group("KIND_AUTO", 0, 0, config.backend, has_gpu=has_gpu),),
            parameters={name: config.parameters[name].string_value for name in sorted(config.parameters)},
            default_model_filename=config.default_model_filename,
            gpu_accelerators=tuple(map(_accelerator, accelerators.gpu_execution_accelerator)),
            cpu_accelerators=tuple(map(_accelerator, accelerators.cpu_execution_accelerator)),
            graph_level=config.optimization.graph.level,
            row_bytes=sum(map(tensor_bytes, (*config.input, *config.output))) + _sample_bytes(config),
            op_libraries=tuple(config.model_operations.op_library_filename),
            decoupled=config.model_transaction_policy.decoupled,
            input_ranks={tensor.name: (config.max_batch_size > 0) + _rank(tensor) for tensor in config.input},
        )

    @property
    def instances(self) -> int:
        """Number of instances in all groups."""
        return sum(group.count for group in self.instance_groups)

    @property
    def processes(self) -> int:
        """Number of processes that Triton starts: a group's count applies to each of its GPUs."""
        return sum(group.count * max(1, len(group.gpus)) for group in self.instance_groups)

    @property
    def gpus(self) -> tuple[int, ...]:
        """GPU number of each GPU instance."""
        groups = [group for group in self.instance_groups if group.device and group.device.is_gpu]
        numbers = [(group.gpus or (group.device.index,), group.count) for group in groups if group.device]
        return tuple(gpu for gpus, count in numbers for gpu in gpus for _ in range(count))

    @property
    def device(self) -> Device:
        """Device of the first instance.

        Raises:
            RepositoryError: The group is of KIND_MODEL, which is not supported.
        """
        if any(group.device is None for group in self.instance_groups):
            raise RepositoryError("instance_group of KIND_MODEL is not supported", hint="use KIND_CPU or KIND_GPU")
        return self.instance_groups[0].device or CPU

    @property
    def batch_bytes(self) -> int:
        """Lower bound of the bytes of all inputs and outputs of a full batch, see `row_bytes`."""
        return max(1, self.max_batch_size) * self.row_bytes

    @property
    def warmup_batch_sizes(self) -> tuple[int, ...]:
        """List the batch sizes to run before the first request, in ascending order.

        With the dynamic batcher: 1, the powers of two, the preferred sizes and the largest size. Without it: the
        smallest and the largest size.
        """
        largest = max(1, self.max_batch_size)
        sizes = {1, largest}
        if self.preferred_batch_sizes is not None:
            powers = (1 << exponent for exponent in range(largest.bit_length()))
            sizes |= {size for size in (*powers, *self.preferred_batch_sizes) if 0 < size <= largest}
        return tuple(sorted(sizes))


GPU_HINT = "write kind: KIND_CPU in its config.pbtxt, or KIND_AUTO to use a GPU where there is one"


def check_gpus(config: ModelConfigProto, *, has_gpu: bool) -> None:
    """Refuse instances on GPUs if the machine has none.

    Raises:
        RepositoryError: There is no GPU for an instance group.
    """
    for group in config.instance_group:
        if group.kind == group.KIND_GPU and not has_gpu:
            raise RepositoryError("instance_group: kind KIND_GPU, but this machine has no GPU", hint=GPU_HINT)


def _instance_group(group: Any, backend: str, *, has_gpu: bool) -> InstanceGroup:
    kind = group.Kind.Name(group.kind)
    found = _group(kind, group.count, group.gpus[0] if group.gpus else 0, backend, has_gpu=has_gpu)
    return replace(found, gpus=tuple(group.gpus)) if found.device and found.device.is_gpu else found


def _group(kind: str, count: int, gpu: int, backend: str, *, has_gpu: bool) -> InstanceGroup:
    """Apply Triton's defaults to a group: KIND_AUTO uses a GPU if there is one, a count of 0 is the default count."""
    if kind == "KIND_MODEL":
        return InstanceGroup(count=count or 1, device=None)
    if kind == "KIND_GPU" or (kind == "KIND_AUTO" and has_gpu):
        return InstanceGroup(count=count or 1, device=Device.gpu(gpu))
    return InstanceGroup(count=count or _DEFAULT_CPU_INSTANCES.get(backend, 1), device=CPU)


def _accelerator(block: Any) -> Accelerator:
    return Accelerator(name=block.name, parameters={name: block.parameters[name] for name in sorted(block.parameters)})


def _sample_bytes(config: ModelConfigProto) -> int:
    """Bytes of the decoded sample that an image model passes through shared memory."""
    text = config.parameters[IMAGE_SAMPLE_BYTES].string_value if IMAGE_SAMPLE_BYTES in config.parameters else ""
    return int(text) if text.isdigit() else 0


def tensor_bytes(tensor: Any) -> int:
    """Bytes of one row of an input or output; dynamic dimensions count as 1, strings as 0."""
    dtype = DType.from_config(tensor.data_type) if tensor.data_type else DType.BYTES  # not completed: size unknown
    elements: int = math.prod(max(1, dim) for dim in tensor.dims)
    return dtype.bytes * elements


def _rank(tensor: Any) -> int:
    return len(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
