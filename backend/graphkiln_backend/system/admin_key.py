"""The admin key: the header that carries it, and where programs on the server's machine find it.

Loading a model runs code (Triton accepts a model's files in a request), so requests that change the server need a key.
Each `graphkiln serve` creates a new key and writes it to one file per port that only its own user can read: commands of
the same user need no configuration, while other users and web pages are refused.

The files are not in `XDG_RUNTIME_DIR`, because that folder is removed when the user logs out.
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
    """Yield this user's folders for keys: the preferred one, and a fallback for read-only home folders.

    The preferred folder is named after the machine, because homes may be shared.
    Source: XDG Base Directory Specification, `XDG_STATE_HOME`.
    """
    state = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")  # noqa: PTH111 - never raises
    folder = Path(state) / "graphkiln" / "keys" / os.uname().nodename
    if folder.is_absolute():
        yield folder
    with suppress(FileNotFoundError):  # there is no writable folder for temporary files
        yield Path(tempfile.gettempdir()) / f"graphkiln-keys-{os.geteuid()}"


def find_key(host: str, port: int) -> str:
    """Find the admin key of a server in the environment, or in the key file of a local server of this user.

    Args:
        host: The server's name or address; key files are used only for this machine.
        port: Its HTTP or gRPC port.

    Returns:
        The key, or an empty string.

    Raises:
        InvalidInput: The key in the environment is invalid, or the file named there contains no valid key.
    """
    if key := os.environ.get(KEY_VARIABLE, ""):
        return check_key(key.strip(), KEY_VARIABLE)
    if file := os.environ.get(KEY_FILE_VARIABLE, ""):
        return read_key(Path(file))
    folders = key_folders() if is_local(host) else ()
    return next(filter(None, (_read_published_key(folder / str(port)) for folder in folders)), "")


def read_key(file: Path) -> str:
    """Read the key in a file.

    Raises:
        InvalidInput: The file cannot be read, or contains no valid key.
    """
    try:
        return check_key(read_bytes(file, _MAX_BYTES).decode("ascii").strip(), str(file))
    except (OSError, ValueError) as error:
        hint = "name a file that contains only the key"
        raise InvalidInput(f"cannot read the admin key in {file}: {error}", hint=hint) from error


def check_key(key: str, origin: str) -> str:
    """Return the key if it is valid in an HTTP header and on tritonserver's command line.

    Raises:
        InvalidInput: It is not; the message does not show the key.
    """
    if key.isascii() and key.replace("-", "").replace("_", "").isalnum():
        return key
    raise InvalidInput(
        f"the admin key of {origin} must consist of letters, digits, '-' and '_', with at least one letter or digit",
        hint="create one with: python3 -c 'import secrets; print(secrets.token_hex(32))'",
    )


def needs_admin_key(reason: str) -> bool:
    """Check an error message for a missing or wrong admin key; over gRPC, Triton's code for it is UNAVAILABLE."""
    return "restricted" in reason and HTTP_HEADER in reason


def is_local(host: str) -> bool:
    """Check that a host is this machine's loopback interface."""
    with suppress(ValueError):
        return host == "localhost" or ip_address(host).is_loopback
    return False


def is_private(path: Path) -> bool:
    """Check that a path is not a symbolic link, belongs to this user, and is not writable by others."""
    with suppress(OSError):
        status = path.lstat()
        is_ours = status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
        return is_ours and not status.st_mode & _OTHERS_WRITE
    return False


def _read_published_key(file: Path) -> str:
    with suppress(InvalidInput):  # a full disk may leave a truncated file
        if is_private(file.parent) and is_private(file):
            return read_key(file)
    return ""
