"""Faults of disks: small ones are mounted for the service, and filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from soaking.fault import Fault, Field, Over
from soaking.process_faults import is_gone
from soaking.store_faults import GoodVersion

CACHE_BYTES = 32 << 20
TEMPORARY_BYTES = 192 << 20
_FILLER = "filler"


class FullCache(GoodVersion):
    """The disk of the artifact cache is full while a good version comes."""

    name = "cache's disk full, good version"

    def __init__(self) -> None:
        super().__init__()
        self._next = 1020

    def inject(self, field: Field) -> Over:
        fill_disk(cache_folder(field.folder))
        return super().inject(field)

    def undo(self, field: Field) -> None:
        empty_disk(cache_folder(field.folder))
        super().undo(field)


class FullTemporary(Fault):
    """tritonserver dies while the disk of temporary files is full, so that there is no room to start it again."""

    name = "temporary files' disk full, SIGKILL to tritonserver"
    cause = "server_died"
    hold_s = 4.0

    def inject(self, field: Field) -> Over:
        fill_disk(field.service.temporary)
        (victim,) = field.service.servers()
        victim.kill()
        return lambda: is_gone(victim) and bool(field.service.servers())

    def undo(self, field: Field) -> None:
        empty_disk(field.service.temporary)


def fill_disk(folder: Path) -> None:
    """Leaves no room on the disk of a folder."""
    with (folder / _FILLER).open("wb") as file:
        try:
            while file.write(bytes(1 << 16)):
                file.flush()
        except OSError:
            pass


def empty_disk(folder: Path) -> None:
    """Takes that back."""
    (folder / _FILLER).unlink(missing_ok=True)


def cache_folder(folder: Path) -> Path:
    """The artifact cache of the served models."""
    return folder / "cache.mount"


@contextmanager
def small_disk(mount: Path, size_bytes: int) -> Iterator[bool]:
    """Mounts a small disk; gives whether that was allowed. Else the folder is an ordinary one."""
    mount.mkdir(mode=0o700)
    options = f"size={size_bytes},mode=700"
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "soak", str(mount)], check=False, capture_output=True)
    try:
        yield done.returncode == 0
    finally:
        if done.returncode == 0:
            subprocess.run(["umount", "--lazy", str(mount)], check=False)
