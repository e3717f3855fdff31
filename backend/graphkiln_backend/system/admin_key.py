"""The admin key: the header that carries it, and where a program on the server's own machine finds it.

Loading models means running code (Triton takes a model's files from the request), so what changes the server needs
a key. `graphkiln serve` makes a new one at each start and leaves it where only its own user can read it, one file for
each port: the same user's commands need no set-up, another user's and a web page's requests are refused.

Not in `XDG_RUNTIME_DIR`: that goes when its user logs out, and a server that was left running would lose its key.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.files import KIB, read_bytes

HTTP_HEADER = "x-graphkiln-admin-key"
# Triton puts its own prefix before the name of the header. Source: `--grpc-restricted-protocol`.
GRPC_HEADER = f"triton-grpc-protocol-{HTTP_HEADER}"
KEY_VARIABLE = "GRAPHKILN_ADMIN_KEY"
KEY_FILE_VARIABLE = "GRAPHKILN_ADMIN_KEY_FILE"
HOW_TO_GIVE_IT = f"give the server's admin key: --admin-key-file FILE, Client(admin_key=...) or {KEY_VARIABLE}"

_MAX_BYTES = 4 * KIB
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def key_folders() -> Iterator[Path]:
    """Folders for keys of this user's servers: the preferred one, and another for a home that is read-only."""
    yield from (folder for folder in (_state_folder(),) if folder.is_absolute())
    with suppress(FileNotFoundError):  # no folder for temporary files can be written
        yield Path(tempfile.gettempdir()) / f"graphkiln-keys-{os.geteuid()}"


def _state_folder() -> Path:
    """One for each machine: homes may be shared. Source: XDG Base Directory Specification, `XDG_STATE_HOME`."""
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 - raises never
    return Path(state) / "graphkiln" / "keys" / os.uname().nodename


def find_key(host: str, port: int) -> str:
    """The admin key for a server: of the environment, else of a server of this user on this machine, else empty.

    Args:
        host: The server's name or address; a key that was found by itself goes to this machine only.
        port: Its HTTP or gRPC port.

    Raises:
        InvalidInput: The environment names a file that holds no key.
    """
    if key := os.environ.get(KEY_VARIABLE, ""):
        return check_key(key.strip(), KEY_VARIABLE)
    if file := os.environ.get(KEY_FILE_VARIABLE, ""):
        return read_key(Path(file))
    folders = key_folders() if is_local(host) else ()
    return next(filter(None, (_published_key(folder / str(port)) for folder in folders)), "")


def read_key(file: Path) -> str:
    """The key in a file.

    Raises:
        InvalidInput: The file cannot be read, or holds no key.
    """
    try:
        return check_key(read_bytes(file, _MAX_BYTES).decode("ascii").strip(), str(file))
    except (OSError, ValueError) as error:
        raise InvalidInput(f"cannot read the admin key in {file}: {error}", hint="name a file that holds it") from error


def check_key(key: str, origin: str) -> str:
    """The key, if it can be sent as a header and given to tritonserver.

    Raises:
        InvalidInput: It cannot; the message does not show it.
    """
    if key.isascii() and key.replace("-", "").replace("_", "").isalnum():
        return key
    raise InvalidInput(
        f"the admin key of {origin} must be letters, digits, '-' and '_', and at least one of them",
        hint="python3 -c 'import secrets; print(secrets.token_hex(32))' makes one",
    )


def needs_admin_key(reason: str) -> bool:
    """True if Triton refused a request because the admin key was missing or wrong; over gRPC it says UNAVAILABLE."""
    return "restricted" in reason and HTTP_HEADER in reason


def is_local(host: str) -> bool:
    """True if a host is this machine's loopback interface."""
    with suppress(ValueError):
        return host == "localhost" or ip_address(host).is_loopback
    return False


def is_private(path: Path) -> bool:
    """True if a file or folder, which is not a link, belongs to this user, and others cannot write to it."""
    with suppress(OSError):
        status = path.lstat()
        is_ours = status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
        return is_ours and not status.st_mode & _OTHERS_WRITE
    return False


def _published_key(file: Path) -> str:
    with suppress(InvalidInput):  # what is left of a disk that was full
        if is_private(file.parent) and is_private(file):
            return read_key(file)
    return ""
