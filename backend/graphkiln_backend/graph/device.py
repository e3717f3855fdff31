"""Devices, and the distribution of a model over them: copies, pipeline stages, shards."""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.files import format_size


class DeviceKind(enum.StrEnum):
    """A kind of device."""

    CPU = "cpu"
    GPU = "gpu"


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this machine.

    Attributes:
        kind: CPU or GPU.
        index: Index of the GPU in the driver's order; 0 for the CPU.
    """

    kind: DeviceKind
    index: int = 0

    @classmethod
    def gpu(cls, index: int = 0) -> Device:
        """A GPU by its number."""
        return cls(DeviceKind.GPU, index)

    @classmethod
    def parse(cls, text: str) -> Device:
        """Parse `cpu`, `gpu` or `gpu:1`; inverse of `str`.

        Raises:
            ManifestError: The text is invalid.
        """
        kind, colon, index = text.partition(":")
        if text == DeviceKind.CPU:
            return CPU
        if kind == DeviceKind.GPU and (index.isdecimal() if colon else True):
            return cls.gpu(int(index or 0))
        raise ManifestError(f"'{text}' is not a device", hint="write cpu, or gpu:0 for the first GPU")

    @property
    def is_gpu(self) -> bool:
        """True for a GPU."""
        return self.kind is DeviceKind.GPU

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.is_gpu else str(self.kind)


CPU = Device(DeviceKind.CPU)


# Distribution of a model: whole copies, consecutive stages of its graph, shards of its products.

# Queue length between two pipeline stages, to absorb variations of their speed.
WAITING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Numbers of copies, stages and shards of a model.

    Attributes:
        data: Copies of the whole model, each on separate devices; 0 for the number of instances. With more instances,
            several share the stages of a copy.
        pipeline: Number of consecutive stages of a copy.
        tensor: Number of shards of the matrix products of a stage.
        auto: Choose the smallest `pipeline` and `tensor` that fit the memory.
        micro_batches: Parts of a batch in the pipeline; 0 for the default.
        memory_bytes: Memory limit of a device; 0 for no limit.
    """

    data: int = 0
    pipeline: int = 1
    tensor: int = 1
    auto: bool = False
    micro_batches: int = 0
    memory_bytes: int = 0

    @property
    def devices(self) -> int:
        """Number of devices of a copy."""
        return self.pipeline * self.tensor

    @property
    def splits(self) -> bool:
        """True if a copy uses several devices."""
        return self.devices > 1

    def of(self, pipeline: int, tensor: int) -> Parallelism:
        """Return a copy with these numbers and without `auto`."""
        return replace(self, pipeline=pipeline, tensor=tensor, auto=False)

    def __str__(self) -> str:
        words = [f"data={self.data}"] if self.data else []
        words += ["auto"] if self.auto else [f"pipeline={self.pipeline}", f"tensor={self.tensor}"]
        words += [f"micro_batches={self.micro_batches}"] if self.micro_batches else []
        words += [f"memory={format_size(self.memory_bytes)}"] if self.memory_bytes else []
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Place:
    """Device and cores of a stage or a shard.

    Attributes:
        device: The CPU or a GPU.
        cores: Numbers of its exclusive CPU cores; empty on a GPU.
    """

    device: Device
    cores: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.cores:
            return str(self.device)
        first, last = self.cores[0], self.cores[-1]
        if last - first + 1 == len(self.cores):
            return f"cores {first}-{last}" if last > first else f"core {first}"
        return f"cores {', '.join(map(str, self.cores))}"
