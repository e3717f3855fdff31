"""Places of the stages and shards of an instance: groups of cores, or GPUs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from graphkiln_backend.graph.device import Device, Parallelism, Place
from graphkiln_backend.graph.errors import LoweringError


def find_places(
    numbers: Parallelism, *, instances: int, instance: int, device: Device, cores: Sequence[int], gpus: int
) -> tuple[Place, ...]:
    """Find the places of one instance: stage by stage, within a stage shard by shard.

    The cores of a machine are cut into groups of neighbors, as equal as they can be, which no two places share. On GPUs
    an instance takes those behind its own: with `gpus: [0, 2]` and two stages, 0 and 1, 2 and 3. Where there are more
    instances than copies, several share the cores of a copy: while a batch of one ends, one of another begins.

    Args:
        numbers: Numbers of the spread.
        instances: Number of instances of the model.
        instance: Number of this one, from 0.
        device: Device on which Triton starts the instance.
        cores: Numbers of all cores that the model may use, neighbors behind each other.
        gpus: Number of GPUs of the machine.

    Raises:
        LoweringError: There are not that many instances, cores or GPUs.
    """
    copies = count_copies(numbers, instances, device)
    if device.is_gpu:
        return _gpus(numbers, device, gpus)
    wanted = copies * numbers.devices
    if wanted > len(cores):
        raise LoweringError(
            f"{numbers} asks for {wanted} groups of cores",
            attempts=(f"{counted(copies, 'instance')} of {numbers.devices} each, and {len(cores)} cores are here",),
            hint="choose smaller numbers, or fewer instances (instance_group)",
        )
    groups = core_groups(cores, wanted)
    first = (instance % copies) * numbers.devices
    return tuple(Place(device, group) for group in groups[first : first + numbers.devices])


def core_groups(cores: Sequence[int], count: int) -> list[tuple[int, ...]]:
    """Cut at least `count` cores into groups of neighbors; the first have one more where the numbers do not divide."""
    size, more = divmod(len(cores), count)
    ends = [size * number + min(number, more) for number in range(count + 1)]
    return [tuple(cores[begin:end]) for begin, end in itertools.pairwise(ends)]


def count_copies(numbers: Parallelism, instances: int, device: Device) -> int:
    """Count the copies of a model that share no devices: as many as it has instances, unless stages are shared.

    Raises:
        LoweringError: There are not that many instances.
    """
    shares = (numbers.pipeline > 1 or numbers.auto) and not device.is_gpu
    if numbers.data not in (0, instances) and not (shares and instances % numbers.data == 0):
        raise LoweringError(
            f"data={numbers.data} asks for as many instances of the model",
            attempts=(f"its configuration has {instances}",),
            hint=f"write into config.pbtxt: instance_group [ {{ count: {numbers.data} }} ]",
        )
    return numbers.data or instances


def _gpus(numbers: Parallelism, device: Device, gpus: int) -> tuple[Place, ...]:
    if device.index + numbers.devices > gpus:
        present = ", ".join(str(Device.gpu(index)) for index in range(gpus)) or "none"
        raise LoweringError(
            f"{numbers} asks for {numbers.devices} GPUs from {device} on",
            attempts=(f"GPUs that are here: {present}",),
            hint="choose smaller numbers, or other `gpus` of the instance_group",
        )
    return tuple(Place(Device.gpu(device.index + number)) for number in range(numbers.devices))


def check_apart(numbers: Parallelism, gpus: Sequence[int]) -> None:
    """Refuse instances of which one would begin on a GPU of another one.

    Args:
        numbers: Numbers of the spread.
        gpus: First GPU of each instance.

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
    """`1 core`, `2 cores`."""
    return f"{count} {noun}{'s' if count > 1 else ''}"
