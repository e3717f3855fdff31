"""Files and devices that hang or flood their readers."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path


def pipe(path: Path) -> None:
    os.mkfifo(path)


def zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def unix_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as bound:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            bound.bind(f"/proc/self/fd/{folder}/{path.name}")  # a socket's path may have 107 characters only
        finally:
            os.close(folder)


def looping_link(path: Path) -> None:
    path.symlink_to(path)


def huge(path: Path) -> None:
    """Make a sparse file of 64 GiB."""
    with path.open("wb") as file:
        file.truncate(64 << 30)


# Name -> function that makes it, and a part of its reader's error.
ODD: dict[str, tuple[Callable[[Path], None], str]] = {
    "pipe": (pipe, "it is a pipe, expected a regular file"),
    "device": (zeros, "it is a device, expected a regular file"),
    "socket": (unix_socket, "it is a socket, expected a regular file"),
    "folder": (Path.mkdir, "Is a directory"),
    "loop": (looping_link, "Too many levels of symbolic links"),
    "huge": (huge, r"it has 64 GiB, which is more than the .* that such a file may have"),
}
