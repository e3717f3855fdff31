"""Where a graph runs: the CPU, or one of the GPUs."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from graphkiln_backend.graph.errors import ManifestError


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
        """Reads `cpu`, `gpu` or `gpu:1`; the inverse of `str`.

        Raises:
            ManifestError: It is none of these.
        """
        kind, colon, index = text.partition(":")
        if text == DeviceKind.CPU:
            return CPU
        if kind == DeviceKind.GPU and (index.isdecimal() if colon else True):
            return cls.gpu(int(index or 0))
        raise ManifestError(f"'{text}' is not a device", hint="write cpu, or gpu:0 for the first GPU")

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.kind is DeviceKind.GPU

    def __str__(self) -> str:
        return f"{self.kind}:{self.index}" if self.is_gpu else str(self.kind)


CPU = Device(DeviceKind.CPU)
