"""Devices, and how a model is spread over them: copies, pipeline stages, shards."""

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
        index: Number of the GPU in the driver's order; 0 for the CPU.
    """

    kind: DeviceKind
    index: int = 0

    @classmethod
    def gpu(cls, index: int = 0) -> Device:
        """A GPU by its number."""
        return cls(DeviceKind.GPU, index)

    @classmethod
    def parse(cls, text: str) -> Device:
        """Read `cpu`, `gpu` or `gpu:1`; the inverse of `str`.

        Raises:
            ManifestError: The text is another one.
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


# Over how many devices a model is spread: whole copies, consecutive stages of its graph, shards of its products.

# Micro-batches that may wait between two stages of a pipeline: enough that neither waits for the other's slow ones.
WAITING = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Parallelism:
    """Numbers of copies, stages and shards of a model.

    Attributes:
        data: Copies of the whole model, each on separate devices; 0 for as many as there are instances. Where there
            are more instances, several share the stages of a copy.
        pipeline: Consecutive stages that a copy is cut into.
        tensor: Shards that the matrix products of a stage are cut into.
        auto: Whether `pipeline` and `tensor` are the smallest that fit the memory.
        micro_batches: Parts of a batch that are under way in the stages; 0 for the default.
        memory_bytes: What a device may hold; 0 for no limit.
    """

    data: int = 0
    pipeline: int = 1
    tensor: int = 1
    auto: bool = False
    micro_batches: int = 0
    memory_bytes: int = 0

    @property
    def devices(self) -> int:
        """Devices of one copy."""
        return self.pipeline * self.tensor

    @property
    def splits(self) -> bool:
        """True where a copy is spread over several devices."""
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
        cores: Numbers of the cores of a CPU that compute it and nothing else of the model; empty on a GPU.
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
