"""Places of the stages and shards of an instance: groups of cores, or GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from graphkiln_backend.graph.device import Device, Parallelism, Place
from graphkiln_backend.graph.errors import LoweringError


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """Devices of this machine for one model.

    Attributes:
        device: Device on which Triton starts the instance.
        cores: Numbers of all cores that the model may use, neighbors behind each other.
        gpus: Number of GPUs.
        instances: Number of instances of the model.
        instance: Number of this one, from 0.
    """

    device: Device
    cores: Sequence[int]
    gpus: int = 0
    instances: int = 1
    instance: int = 0

    def copies(self, numbers: Parallelism) -> int:
        """Count the copies that share no devices: as many as there are instances, unless stages are shared.

        Raises:
            LoweringError: There are not that many instances.
        """
        shares = (numbers.pipeline > 1 or numbers.auto) and not self.device.is_gpu
        if numbers.data not in (0, self.instances) and not (shares and self.instances % numbers.data == 0):
            raise LoweringError(
                f"data={numbers.data} asks for as many instances of the model",
                attempts=(f"its configuration has {self.instances}",),
                hint=f"write into config.pbtxt: instance_group [ {{ count: {numbers.data} }} ]",
            )
        return numbers.data or self.instances

    def devices(self, numbers: Parallelism) -> int:
        """Count the GPUs, or groups of cores, that one copy may use at most."""
        return self.gpus - self.device.index if self.device.is_gpu else len(self.cores) // self.copies(numbers)

    def places(self, numbers: Parallelism) -> tuple[Place, ...]:
        """Find the places of the instance: stage by stage, within a stage shard by shard.

        The cores are cut into groups of neighbors, as equal as they can be, which no two places share. On GPUs an
        instance takes those behind its own: with `gpus: [0, 2]` and two stages, 0 and 1, 2 and 3. Where there are more
        instances than copies, several share the cores of a copy: while a batch of one ends, one of another begins.

        Raises:
            LoweringError: There are not that many instances, cores or GPUs.
        """
        copies = self.copies(numbers)
        if self.device.is_gpu:
            return self._gpus(numbers)
        wanted = copies * numbers.devices
        if wanted > len(self.cores):
            raise LoweringError(
                f"{numbers} asks for {wanted} groups of cores",
                attempts=(
                    f"{counted(copies, 'instance')} of {numbers.devices} each, and {len(self.cores)} cores are here",
                ),
                hint="choose smaller numbers, or fewer instances (instance_group)",
            )
        size, more = divmod(len(self.cores), wanted)  # the first groups have one core more
        ends = [size * number + min(number, more) for number in range(wanted + 1)]
        groups = [Place(self.device, tuple(self.cores[begin:end])) for begin, end in itertools.pairwise(ends)]
        first = (self.instance % copies) * numbers.devices
        return tuple(groups[first : first + numbers.devices])

    def _gpus(self, numbers: Parallelism) -> tuple[Place, ...]:
        if self.device.index + numbers.devices > self.gpus:
            present = ", ".join(str(Device.gpu(index)) for index in range(self.gpus)) or "none"
            raise LoweringError(
                f"{numbers} asks for {numbers.devices} GPUs from {self.device} on",
                attempts=(f"GPUs that are here: {present}",),
                hint="choose smaller numbers, or other `gpus` of the instance_group",
            )
        return tuple(Place(Device.gpu(self.device.index + number)) for number in range(numbers.devices))


def check_apart(numbers: Parallelism, gpus: Sequence[int]) -> None:
    """Refuse instances, by the first GPU of each, of which one would begin on a GPU of another one.

    Raises:
        LoweringError: Two instances would share a GPU.
    """
    for first, second in itertools.pairwise(sorted(gpus)):
        if second - first < numbers.devices:
            apart = ", ".join(str(number * numbers.devices) for number in range(len(gpus)))
            raise LoweringError(
                f"two instances of {numbers.devices} GPUs each would share {Device.gpu(second)}",
                attempts=(f"one begins on {Device.gpu(first)}, the other on {Device.gpu(second)}",),
                hint=f"write into config.pbtxt: instance_group [ {{ count: 1 kind: KIND_GPU gpus: [ {apart} ] }} ]",
            )


def counted(count: int, noun: str) -> str:
    """Spell out a number: `1 core`, `2 cores`."""
    return f"{count} {noun}{'s' if count > 1 else ''}"
