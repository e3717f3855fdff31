"""Shared-memory regions of a run's instances: size and ownership.

Each Python instance exchanges tensors with tritonserver through a region in /dev/shm that starts at 1 MB and grows on
demand. Docker's default is 64 MB in total: too little is an error at the start, with the fix, instead of a crash under
load. The regions of a run have an owner file, locked while the run lives, because containers may share /dev/shm but not
/tmp.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.repository.overlay import batch_footprints

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - Triton's place for regions, not a temporary file
OWNER_SUFFIX = "-owner"
# Reserved name prefix: since 25.08 Triton does not let clients register such regions.
# Source: Triton server, `kTritonSharedMemoryRegionPrefix`.
RESERVED_PREFIX = "triton_python_backend_shm_region_"

_MIN_REGION_BYTES = 1 << 20
_ALIGNMENT = 1 << 20
_HEADROOM = 1.25  # for messages and the allocator's data beside the tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedMemoryPlan:
    """Sizes of shared-memory regions.

    Attributes:
        region_bytes: Initial size of each instance's region.
        needed_bytes: Total size if each instance holds a full batch.
        instances: Number of instances; 0 if unknown.
    """

    region_bytes: int
    needed_bytes: int
    instances: int = 0


def plan_shared_memory(mirrors: Sequence[Path], *, free_bytes: int) -> SharedMemoryPlan:
    """Size the regions for the largest batches of the models.

    Raises:
        ServerSetupError: There is too little; the hint names a sufficient size.
    """
    sizes = [region_bytes(footprint) for footprint in batch_footprints(mirrors)]
    needed = sum(sizes)
    if needed > free_bytes:
        raise ServerSetupError(
            f"{SHARED_MEMORY} has {free_bytes >> 20} MB left, but {len(sizes)} model instances need {needed >> 20} MB "
            "for their largest batches",
            hint=f"docker run --shm-size={2 * needed >> 20}m, or a smaller max_batch_size",
        )
    if free_bytes < _MIN_REGION_BYTES:
        raise ServerSetupError(
            f"{SHARED_MEMORY} is full: {free_bytes >> 10} kB left, and an instance begins with 1 MB",
            hint="remove files there (graphkiln doctor lists leftovers of dead runs), or docker run --shm-size=1g",
        )
    largest = max(sizes, default=_MIN_REGION_BYTES)
    # One size for all instances: the largest, if it leaves half of the memory free.
    fits = largest * len(sizes) <= free_bytes // 2
    first = largest if fits else _MIN_REGION_BYTES
    return SharedMemoryPlan(region_bytes=first, needed_bytes=needed, instances=len(sizes))


def free_shared_memory() -> int:
    """Free bytes of /dev/shm.

    Raises:
        ServerSetupError: There is no /dev/shm.
    """
    try:
        stats = os.statvfs(SHARED_MEMORY)
    except OSError as error:
        raise ServerSetupError(
            f"there is no {SHARED_MEMORY}: Triton needs it for tensors", hint="mount a tmpfs there"
        ) from error
    return stats.f_bavail * stats.f_frsize


def region_bytes(footprint_bytes: int) -> int:
    """Size of the region of an instance in bytes, rounded up to whole MiB.

    Args:
        footprint_bytes: Total size of inputs and outputs of its largest batch.
    """
    size_bytes = max(_MIN_REGION_BYTES, int(footprint_bytes * _HEADROOM) + _MIN_REGION_BYTES)
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT


def region_owner(run: str) -> Path:
    """Owner file of a run's regions, locked while the run lives."""
    return SHARED_MEMORY / f"{run}{OWNER_SUFFIX}"


def remove_regions(run: str) -> None:
    """Remove the shared-memory regions of a run, as far as possible."""
    owner = region_owner(run)
    for region in _regions(run) - {owner}:
        if region.is_dir() and not region.is_symlink():
            shutil.rmtree(region, ignore_errors=True)
        else:
            with suppress(OSError):
                region.unlink(missing_ok=True)
    if _regions(run) <= {owner}:  # otherwise keep the owner file, so that the next start tries again
        with suppress(OSError):
            owner.unlink(missing_ok=True)


def _regions(run: str) -> set[Path]:
    """Regions and folders of a run in /dev/shm, with the reserved prefix or, as before 28 November 2026, without it."""
    return {*SHARED_MEMORY.glob(f"{run}-*"), *SHARED_MEMORY.glob(f"{RESERVED_PREFIX}{run}-*")}
