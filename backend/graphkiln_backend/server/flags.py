"""tritonserver's own flags: checked against its `--help`, completed with our defaults, otherwise passed untouched."""

from __future__ import annotations

import errno
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.spelling import did_you_mean

_TRUE = {"true", "1", "on"}
_STORE_FLAGS = ("model-repository", "model-store")
_OURS = ("backend-directory",)


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenAddress:
    """An address that the server will listen on."""

    protocol: str
    host: str
    port: int

    @property
    def local_address(self) -> tuple[str, int]:
        """Where this machine reaches it."""
        return ("127.0.0.1" if self.host == "0.0.0.0" else self.host, self.port)  # noqa: S104 - compared, not bound


_DEFAULTS = (("http", "HTTP", 8000), ("grpc", "gRPC", 8001), ("metrics", "metrics", 8002))


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonFlags:
    """The flags that a user gave for tritonserver.

    Attributes:
        arguments: As typed, in order, without the model stores.
        values: Flag -> its last value.
        stores: Model stores given by tritonserver's own flag names.
        backends: A backend directory given by the user, or None.
    """

    arguments: tuple[str, ...]
    values: dict[str, str]
    stores: tuple[Path, ...]
    backends: Path | None

    @classmethod
    def parse(cls, arguments: Sequence[str], known: dict[str, bool]) -> TritonFlags:
        """Reads an argument list.

        Args:
            arguments: `--flag=value`, `--flag value` or `--flag`.
            known: tritonserver's flags -> whether they take a value.

        Raises:
            ServerSetupError: A flag is unknown (the nearest is named), lacks its value, or is no flag at all.
        """
        kept: list[str] = []
        values: dict[str, str] = {}
        stores: list[Path] = []
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            name, equals, value = argument.removeprefix("--").partition("=")
            _check_known(argument, name, known)
            words = [argument]
            if known[name] and not equals:
                if not rest:
                    raise ServerSetupError(f"--{name} needs a value", hint=f"--{name}=VALUE")
                value = rest.pop(0)
                words.append(value)
            if name in _STORE_FLAGS:
                stores.append(Path(value))
                continue
            values[name] = value
            if name not in _OURS:
                kept += words
        backends = Path(values["backend-directory"]) if "backend-directory" in values else None
        return cls(arguments=tuple(kept), values=values, stores=tuple(stores), backends=backends)

    def endpoint(self, name: str) -> ListenAddress | None:
        """Where `http`, `grpc` or `metrics` will listen, or None when it is switched off.

        Raises:
            ServerSetupError: The port is not a number.
        """
        if self.values.get(f"allow-{name}", "true").lower() not in _TRUE:
            return None
        _, protocol, default = next(row for row in _DEFAULTS if row[0] == name)
        text = self.values.get(f"{name}-port", str(default))
        if not text.isdecimal() or not 0 < int(text) < 65536:
            raise ServerSetupError(
                f"--{name}-port must be a port number, got '{text}'", hint=f"--{name}-port={default}"
            )
        fallback = self.values.get("http-address", "0.0.0.0") if name == "metrics" else "0.0.0.0"  # noqa: S104
        return ListenAddress(protocol=protocol, host=self.values.get(f"{name}-address", fallback), port=int(text))

    def endpoints(self) -> list[ListenAddress]:
        """All addresses that the server will listen on."""
        found = (self.endpoint(name) for name, _, _ in _DEFAULTS)
        return [endpoint for endpoint in found if endpoint]

    def check_ports(self) -> None:
        """Binds every port once.

        Raises:
            ServerSetupError: A port is in use or not allowed; the fix names a free one.
        """
        for name, _, _ in _DEFAULTS:
            endpoint = self.endpoint(name)
            if endpoint and self.values.get(f"reuse-{name}-port", "false").lower() not in _TRUE:
                _check_free(name, endpoint)


def _check_known(argument: str, name: str, known: dict[str, bool]) -> None:
    if not argument.startswith("--"):
        raise ServerSetupError(f"unexpected argument '{argument}'", hint=f"to serve a folder: --model-store {argument}")
    if name not in known:
        otherwise = "graphkiln serve --help names the flags"
        raise ServerSetupError(
            f"neither graphkiln nor tritonserver has a flag '--{name}'",
            hint=did_you_mean(name, [*known, *_STORE_FLAGS], prefix="--", otherwise=otherwise),
        )


def _check_free(name: str, endpoint: ListenAddress) -> None:
    family = socket.AF_INET6 if ":" in endpoint.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((endpoint.host, endpoint.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ServerSetupError(
                    f"cannot listen on {endpoint.host}:{endpoint.port} ({endpoint.protocol}): {error.strerror}",
                    hint=f"choose another address with --{name}-address or port with --{name}-port",
                ) from error
            raise ServerSetupError(
                f"port {endpoint.port} ({endpoint.protocol}) is in use",
                hint=f"stop the program that holds it, or choose another: --{name}-port={_free_port()}",
            ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
