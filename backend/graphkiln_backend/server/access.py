"""The admin key and the endpoints that need it.

The user's own `--http-restricted-api` and `--grpc-restricted-protocol` win for the endpoints that they name.
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

_KEY_BYTES = 32
_ATTEMPTS = 5


@dataclass(frozen=True, slots=True)
class AdminKey:
    """The key that repository control, shared memory, trace and logging endpoints need.

    Attributes:
        value: What the header must hold; never shown.
    """

    value: str = field(repr=False)

    @classmethod
    def obtain(cls, file: Path | None) -> AdminKey:
        """The key in a file, which is made where it is missing; without a file, a new key.

        Raises:
            ServerSetupError: The file cannot be read or made, or holds no key.
        """
        if file is None:
            return cls.generate()
        try:
            return cls(_read_or_write(file))
        except InvalidInput as error:
            raise ServerSetupError(f"--admin-key-file: {error}") from error
        except OSError as error:
            raise ServerSetupError(
                f"--admin-key-file {file} cannot be read or made: {error.strerror}",
                hint="name a file in a folder that is there and may be written",
            ) from error

    @classmethod
    def generate(cls) -> AdminKey:
        """A new key: 256 random bits."""
        return cls(secrets.token_hex(_KEY_BYTES))


class PublishedKey(Closeable):
    """A key, in files that only this user can read; closing removes them, and those of servers that were killed.

    A file is locked as long as its server lives; the next server removes those that are not.

    Args:
        key: The key; None for a server without one.
        flags: Of the server, whose HTTP and gRPC ports name the files.
    """

    def __init__(self, key: AdminKey | None, flags: TritonFlags) -> None:
        self._files: list[Path] = []
        self._locks: list[int] = []
        _remove_dead()
        self._text = key.value if key else ""
        for port in _ports(flags):
            self._publish(str(port))

    def close(self) -> None:
        """Remove the files, unless another server has taken over a port since, and folders that are empty then."""
        for file in self._files:
            self._withdraw(file)
        while self._locks:
            os.close(self._locks.pop())
        for folder in key_folders():
            _remove_if_empty(folder)

    def _publish(self, name: str) -> None:
        _remove_older(name)
        if self._text:
            self._keep(name)

    def _keep(self, name: str) -> None:
        file = next((folder / name for folder in key_folders() if self._write(folder, name)), None)
        if file is None:
            _log.warning("no folder for the admin key: commands on this machine need --admin-key-file")
        else:
            self._files.append(file)

    def _write(self, folder: Path, name: str) -> bool:
        for _ in range(_ATTEMPTS):  # another server that ends may remove the folder as an empty one
            try:
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                if is_private(folder):
                    self._locks.append(_write_new(folder / name, self._text))
                    return True
            except FileNotFoundError:
                continue
            except OSError:
                return False
        return False

    def _withdraw(self, file: Path) -> None:
        with suppress(OSError, InvalidInput):
            if read_key(file) == self._text:
                file.unlink()


def _ports(flags: TritonFlags) -> list[int]:
    addresses = (flags.listen_address(service) for service in ("http", "grpc"))
    return [address.port for address in addresses if address]


def _remove_dead() -> None:
    """Remove what servers left that were killed, whatever their ports."""
    for folder in filter(is_private, key_folders()):
        with suppress(OSError):  # it is no folder
            for file in sorted(folder.iterdir()):
                _remove_if_dead(file)


def _remove_if_dead(file: Path) -> None:
    with locked_if_dead(file) as dead, suppress(OSError):
        if dead:
            file.unlink()


def _remove_if_empty(folder: Path) -> None:
    """Otherwise one folder would stay for each machine with a shared home, and for each user among temporary files."""
    with suppress(OSError):
        if is_private(folder):
            folder.rmdir()


def _remove_older(name: str) -> None:
    for folder in key_folders():
        with suppress(OSError):
            (folder / name).unlink()


def _read_or_write(file: Path) -> str:
    _write_if_missing(file)
    _warn_if_public(file)
    return read_key(file)


def _write_if_missing(file: Path) -> None:
    if not file.exists():
        with suppress(FileExistsError):  # another server has just made it
            os.close(_write_new(file, AdminKey.generate().value))


def _warn_if_public(file: Path) -> None:
    if can_others_read(file):
        _log.warning("--admin-key-file %s can be read by others: chmod 600 %s", file, file)


def _write_new(file: Path, key: str) -> int:
    """Write a key to a new file that only its owner can read, whole or not at all.

    Returns:
        A descriptor; the file is locked as long as it stays open.

    Raises:
        FileExistsError: There is a file, a link, or anything else.
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


# Triton's names of what changes the server. Loading runs code: a request may bring a model's files along.
ADMIN_ENDPOINTS = ("model-repository", "shared-memory", "trace", "logging")
_HTTP_FLAG, _GRPC_FLAG = "http-restricted-api", "grpc-restricted-protocol"
_OTHER_SERVICES = ("sagemaker", "vertex-ai")
_OPEN = (
    "DANGER: anyone who reaches %s may run any code on this machine, since %s need no key "
    "(leave out --admin-key-file off, or listen with --host 127.0.0.1)"
)
_OTHER = "DANGER: tritonserver's %s service listens on every address and knows no key"
_GRPC_PREFIX = GRPC_HEADER.removesuffix(HTTP_HEADER)


@dataclass(frozen=True, slots=True)
class Access:
    """Restrictions of the server's own endpoints.

    Attributes:
        arguments: For tritonserver, beside the user's own; they hold the key.
        http_headers: Headers with which requests of ours reach every restricted endpoint over HTTP.
        grpc_metadata: The same for gRPC.
        open_endpoints: Endpoints that change the server and need no key, as `HTTP model-repository`.
    """

    arguments: tuple[str, ...] = field(default=(), repr=False)
    http_headers: dict[str, str] = field(default_factory=dict, repr=False)
    grpc_metadata: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    open_endpoints: tuple[str, ...] = ()

    @classmethod
    def plan(cls, flags: TritonFlags, key: AdminKey | None) -> Access:
        """Restrict what the user has not restricted otherwise; nothing without a key."""
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
        )

    def warn_if_open(self, flags: TritonFlags) -> None:
        """Log an error where the network may change the server without a key."""
        public = [f"{address.host}:{address.port}" for address in flags.listen_addresses() if address.is_public]
        if self.open_endpoints and public:
            _log.error(_OPEN, ", ".join(public), ", ".join(self.open_endpoints))
        for service in _OTHER_SERVICES:
            if flags.is_on(service, default="false"):
                _log.error(_OTHER, service)


def _restrict(flag: str, endpoints: Sequence[str], key: AdminKey) -> list[str]:
    return [f"--{flag}={','.join(endpoints)}:{HTTP_HEADER}={key.value}"] if endpoints else []


def _read_restrictions(values: Sequence[str]) -> tuple[set[str], dict[str, str]]:
    """The endpoints that a user's flags name, and the headers that they then need."""
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
