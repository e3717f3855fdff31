"""A config.pbtxt as the rest of the project sees it, with what Triton fills in where it is silent.

Triton completes a configuration before an instance starts: the number of instances, their kind of device, the batch
sizes that its scheduler forms. The command line must come to the same values without a server, so its rules stand here
once, and every way to a `ModelConfig` (from the file, or from the protobuf that `parse_json` reads in a Python backend)
leads through them.
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

# CPU instances of a group that names no count; one for every other backend. Source: Triton core,
# `SetDefaultInstanceCount`.
_DEFAULT_CPU_INSTANCES = {DROP_IN_BACKEND: 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceGroup:
    """Instances of a model on one kind of device.

    Attributes:
        count: How many there are, on each GPU where the group names several.
        device: Where the first one runs; None for KIND_MODEL, which leaves it to the model.
        gpus: Numbers of all GPUs that it names.
    """

    count: int
    device: Device | None
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerator:
    """An entry of `optimization.execution_accelerators`.

    Attributes:
        name: Such as `tensorrt`, `cuda` or `openvino`.
        parameters: Its options, as written.
    """

    name: str
    parameters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A model's configuration, with the values that Triton gives to what it leaves out.

    Attributes:
        name: Of the model.
        backend: Name of the backend that serves it.
        platform: Triton's older way to name one.
        max_batch_size: Largest batch that Triton may form; 0 for a model without a batch dimension.
        preferred_batch_sizes: Sizes that the dynamic batcher prefers; None without a dynamic batcher.
        instance_groups: At least one.
        parameters: The `string_value` of each, by key, in alphabetical order.
        default_model_filename: File name of the graph; empty for `model.onnx`.
        gpu_accelerators: Execution accelerators of GPU instances, in the order of preference.
        cpu_accelerators: Execution accelerators of CPU instances, in the order of preference.
        graph_level: `optimization.graph.level`, as written.
        row_bytes: Bytes of one row of all inputs and outputs. Dimensions that vary count as 1, texts as nothing.
            A model that takes images has the sample that it makes of one, too.
        input_ranks: Dimensions of each input as an instance is handed it, the batch among them.
        op_libraries: Libraries of custom operators, as written.
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
            has_gpu: Whether Triton finds a GPU on the machine, where it puts instances of KIND_AUTO.
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
        """Instances of the model: the counts of all groups together."""
        return sum(group.count for group in self.instance_groups)

    @property
    def processes(self) -> int:
        """Instances that Triton starts: of a group that names several GPUs, its count on each of them."""
        return sum(group.count * max(1, len(group.gpus)) for group in self.instance_groups)

    @property
    def gpus(self) -> tuple[int, ...]:
        """Number of the GPU of each instance that is started on one."""
        groups = [group for group in self.instance_groups if group.device and group.device.is_gpu]
        return tuple(gpu for group in groups for gpu in _gpus_of(group) for _ in range(group.count))

    @property
    def device(self) -> Device:
        """Device of the first instance.

        Raises:
            RepositoryError: A group leaves the device to the model, which has no say.
        """
        if any(group.device is None for group in self.instance_groups):
            raise RepositoryError("instance_group of KIND_MODEL is not supported", hint="use KIND_CPU or KIND_GPU")
        return self.instance_groups[0].device or CPU

    @property
    def batch_bytes(self) -> int:
        """Bytes of all inputs and outputs of a largest batch: a lower bound, as `row_bytes`."""
        return max(1, self.max_batch_size) * self.row_bytes

    @property
    def warmup_batch_sizes(self) -> tuple[int, ...]:
        """The batch sizes to run before the first request comes, in ascending order.

        The dynamic batcher forms any size up to the largest: 1, the powers of two, the preferred sizes and the largest
        stand for them. Without it a batch is as large as a request, and only the two ends are known.
        """
        largest = max(1, self.max_batch_size)
        sizes = {1, largest}
        if self.preferred_batch_sizes is not None:
            powers = (1 << exponent for exponent in range(largest.bit_length()))
            sizes |= {size for size in (*powers, *self.preferred_batch_sizes) if 0 < size <= largest}
        return tuple(sorted(sizes))


def _instance_group(group: Any, backend: str, *, has_gpu: bool) -> InstanceGroup:
    kind = group.Kind.Name(group.kind)
    found = _group(kind, group.count, group.gpus[0] if group.gpus else 0, backend, has_gpu=has_gpu)
    return replace(found, gpus=tuple(group.gpus)) if found.device and found.device.is_gpu else found


def _group(kind: str, count: int, gpu: int, backend: str, *, has_gpu: bool) -> InstanceGroup:
    """A group by Triton's rules: KIND_AUTO means a GPU where there is one, and a count of 0 the default one."""
    if kind == "KIND_MODEL":
        return InstanceGroup(count=count or 1, device=None)
    if kind == "KIND_GPU" or (kind == "KIND_AUTO" and has_gpu):
        return InstanceGroup(count=count or 1, device=Device.gpu(gpu))
    return InstanceGroup(count=count or _DEFAULT_CPU_INSTANCES.get(backend, 1), device=CPU)


def _gpus_of(group: InstanceGroup) -> tuple[int, ...]:
    return group.gpus or ((group.device.index,) if group.device else ())


def _accelerator(block: Any) -> Accelerator:
    return Accelerator(name=block.name, parameters={name: block.parameters[name] for name in sorted(block.parameters)})


def _sample_bytes(config: ModelConfigProto) -> int:
    """Bytes of one sample that an image model passes on through shared memory."""
    text = config.parameters[IMAGE_SAMPLE_BYTES].string_value if IMAGE_SAMPLE_BYTES in config.parameters else ""
    return int(text) if text.isdigit() else 0


def tensor_bytes(tensor: Any) -> int:
    """Bytes of one row of an input or output of a configuration; dimensions that vary count as 1, texts as nothing."""
    dtype = DType.from_config(tensor.data_type) if tensor.data_type else DType.BYTES  # not completed: size unknown
    elements: int = math.prod(max(1, dim) for dim in tensor.dims)
    return dtype.bytes * elements


def _rank(tensor: Any) -> int:
    return len(tensor.reshape.shape if tensor.HasField("reshape") else tensor.dims)
