"""The admin key and the endpoints that need it.

The user's `--http-restricted-api` and `--grpc-restricted-protocol` take precedence for the endpoints they name.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.graph.errors import InvalidInput, ServerSetupError
from graphkiln_backend.graph.files import can_others_read
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER, is_private, key_folders, read_key
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import hold_lock, locked_if_dead

_log = logging.getLogger("graphkiln.server")

_ATTEMPTS = 5
# Triton's names of administrative endpoints. Loading runs code: a load request may contain files.
ADMIN_ENDPOINTS = ("model-repository", "shared-memory", "trace", "logging")
_HTTP_FLAG, _GRPC_FLAG = "http-restricted-api", "grpc-restricted-protocol"
_OTHER_SERVICES = ("sagemaker", "vertex-ai")
_OPEN = (
    "DANGER: anyone who reaches %s can run code on this machine, because %s need no key "
    "(leave out --admin-key-file off, or listen with --host 127.0.0.1)"
)
_OTHER = "DANGER: tritonserver's %s service listens on every address and has no key"
_GRPC_PREFIX = GRPC_HEADER.removesuffix(HTTP_HEADER)


@dataclass(frozen=True, slots=True)
class AdminKey:
    """The key of the administrative endpoints.

    Attributes:
        value: Value of the header; never printed.
    """

    value: str = field(repr=False)

    @classmethod
    def obtain(cls, file: Path | None) -> AdminKey:
        """Read the key from a file, creating the file if it is missing; without a file, create a new key.

        Raises:
            ServerSetupError: The file cannot be read or created, or contains no key.
        """
        new = cls(secrets.token_hex(32))
        if file is None:
            return new
        try:
            if not file.exists():
                with suppress(FileExistsError):  # another server has just created it
                    os.close(_write_new(file, new.value))
            if can_others_read(file):
                _log.warning("--admin-key-file %s can be read by others: chmod 600 %s", file, file)
            return cls(read_key(file))
        except InvalidInput as error:
            raise ServerSetupError(f"--admin-key-file: {error}") from error
        except OSError as error:
            raise ServerSetupError(
                f"--admin-key-file {file} cannot be read or created: {error.strerror}",
                hint="use a file in an existing, writable folder",
            ) from error


class PublishedKey(Closeable):
    """Publish a key in files that only this user can read, until it is closed.

    A file is locked while its server runs; starts and closing remove unlocked files of dead servers.

    Args:
        key: The key, or None.
        flags: The server's flags; the files are named after its HTTP and gRPC ports.
    """

    def __init__(self, key: AdminKey | None, flags: TritonFlags) -> None:
        self._files: list[Path] = []
        self._locks: list[int] = []
        self._text = key.value if key else ""
        _remove_dead()
        for address in filter(None, map(flags.listen_address, ("http", "grpc"))):
            name = str(address.port)
            for folder in key_folders():  # remove the key of an earlier server on this port
                with suppress(OSError):
                    (folder / name).unlink()
            if self._text and not any(self._write(folder, name) for folder in key_folders()):
                _log.warning("no folder for the admin key: commands on this machine need --admin-key-file")

    def close(self) -> None:
        """Remove the files, unless another server uses the port now, and empty folders."""
        for file in self._files:
            with suppress(OSError, InvalidInput):
                if read_key(file) == self._text:
                    file.unlink()
        while self._locks:
            os.close(self._locks.pop())
        for folder in filter(is_private, key_folders()):  # with a shared home, there is a folder for each machine
            with suppress(OSError):
                folder.rmdir()

    def _write(self, folder: Path, name: str) -> bool:
        for _ in range(_ATTEMPTS):  # another server may remove the empty folder
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if is_private(folder):
                    self._locks.append(_write_new(folder / name, self._text))
                    self._files.append(folder / name)
                    return True
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return False


def _remove_dead() -> None:
    """Remove the files of dead servers on any port."""
    for folder in filter(is_private, key_folders()):
        with suppress(OSError):  # it is not a folder
            for file in sorted(folder.iterdir()):
                with locked_if_dead(file) as dead, suppress(OSError):
                    if dead:
                        file.unlink()


def _write_new(file: Path, key: str) -> int:
    """Write a key to a new file that only its owner can read, atomically.

    Returns:
        A descriptor; the file is locked while it is open.

    Raises:
        FileExistsError: The path exists.
        OSError: The file cannot be written.
    """
    part = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as target:
        target.write(f"{key}\n")
        lock = hold_lock(part)
    try:
        os.link(part, file)
    except OSError:
        os.close(lock)
        raise
    finally:
        part.unlink()
    return lock


@dataclass(frozen=True, slots=True)
class Access:
    """Restrictions of the server's endpoints.

    Attributes:
        arguments: Further arguments of tritonserver, which contain the key.
        http_headers: Headers that the supervisor sends to restricted endpoints.
        grpc_metadata: The same for gRPC.
        open_endpoints: Administrative endpoints without a key, such as `HTTP model-repository`.
        key: The key of the guarded endpoints.
        guarded: Guarded endpoints by protocol (`http`, `grpc`).
    """

    arguments: tuple[str, ...] = field(default=(), repr=False)
    http_headers: dict[str, str] = field(default_factory=dict, repr=False)
    grpc_metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    open_endpoints: tuple[str, ...] = ()
    key: AdminKey | None = None
    guarded: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def plan(cls, flags: TritonFlags, key: AdminKey | None) -> Access:
        """Restrict the administrative endpoints that the user's flags do not name; nothing without a key."""
        http_users, http_own = _read_restrictions(flags.repeated_values.get(_HTTP_FLAG, ()))
        grpc_users, grpc_own = _read_restrictions(flags.repeated_values.get(_GRPC_FLAG, ()))
        http_left = [name for name in ADMIN_ENDPOINTS if name not in http_users]
        grpc_left = [name for name in ADMIN_ENDPOINTS if name not in grpc_users]
        if key is None:
            unguarded = (*(f"HTTP {name}" for name in http_left), *(f"gRPC {name}" for name in grpc_left))
            return cls((), http_own, _prefix(grpc_own), unguarded)
        return cls(
            (*_restrict(_HTTP_FLAG, http_left, key), *_restrict(_GRPC_FLAG, grpc_left, key)),
            {HTTP_HEADER: key.value, **http_own},
            _prefix({HTTP_HEADER: key.value, **grpc_own}),
            key=key,
            guarded={"http": http_left, "grpc": grpc_left},
        )

    def warn_if_open(self, flags: TritonFlags) -> None:
        """Log an error if administrative endpoints without a key are public."""
        public = [f"{address.host}:{address.port}" for address in flags.listen_addresses() if address.is_public]
        if self.open_endpoints and public:
            _log.error(_OPEN, ", ".join(public), ", ".join(self.open_endpoints))
        for service in _OTHER_SERVICES:
            if flags.is_on(service, default="false"):
                _log.error(_OTHER, service)


def _restrict(flag: str, endpoints: Sequence[str], key: AdminKey) -> list[str]:
    return [f"--{flag}={','.join(endpoints)}:{HTTP_HEADER}={key.value}"] if endpoints else []


def _read_restrictions(values: Sequence[str]) -> tuple[set[str], dict[str, str]]:
    """Endpoints named by a user's flags, and their headers."""
    endpoints: set[str] = set()
    headers: dict[str, str] = {}
    for value in values:
        names, _, header = value.partition(":")
        endpoints.update(name.strip() for name in names.split(","))
        name, _, text = header.partition("=")
        headers[name] = text
    return endpoints, headers


def _prefix(headers: dict[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple((f"{_GRPC_PREFIX}{name}".lower(), value) for name, value in headers.items())
