"""Files that are written as a whole, so that a reader sees the old or the new content."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that only its owner can read, atomically by renaming it into place.

    Raises:
        OSError: The file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb") as file:
        file.write(content)
    temporary.rename(path)


def replace_file(path: Path, text: str, *, durably: bool = False) -> None:
    """Replace a file atomically.

    Args:
        path: The file.
        text: Its content.
        durably: It is the old or the new one also after a crash of the machine.

    Raises:
        OSError: It cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("wb") as file:
            file.write(text.encode())
            file.flush()
            if durably:
                os.fsync(file.fileno())
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    if not durably:
        return
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
