"""Parse tritonserver's flags; they are checked against its `--help` and passed on as typed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.text import did_you_mean, nearest
from graphkiln_backend.storage.address import RemoteAddress, is_remote, parse_store
from graphkiln_backend.system.admin_key import is_local

_DEFAULT_STORE_POLL_S = 15.0  # source: tritonserver's default of `--repository-poll-secs`
_NAMES = ("none", "poll", "explicit")
_RAW_FLAGS = {"disable-auto-complete-config", "strict-model-config", "model-config-name"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlMode:
    """The user's control mode.

    Attributes:
        name: `none`, `poll` or `explicit`.
        poll_s: Seconds between scans of the stores, in poll mode.
        managed: Whether graphkiln controls the models over the repository API; needs HTTP or gRPC.
        completes: Whether graphkiln completes configurations, which flags of the user can turn off.
    """

    name: str
    poll_s: float
    managed: bool
    completes: bool

    @classmethod
    def read(cls, flags: TritonFlags) -> ControlMode:
        """Read the user's flags.

        Raises:
            ServerSetupError: There is no such mode, or the interval is not a number of seconds.
        """
        name = flags.values.get("model-control-mode", "none")
        if name not in _NAMES:  # Triton would print all flags
            raise ServerSetupError(
                f"unknown --model-control-mode '{name}'",
                hint=did_you_mean(name, _NAMES),
            )
        ours = name in {"none", "poll"} and "load-model" not in flags.values  # Triton refuses --load-model here
        return cls(
            name=name,
            poll_s=_poll_seconds(flags),
            managed=ours and any(flags.listen_address(service) for service in ("http", "grpc")),
            completes=not _RAW_FLAGS & flags.values.keys(),
        )

    def before_flags(self) -> tuple[str, ...]:
        """Arguments that the user's override."""
        return ("--exit-on-error=false",) if self.managed or self.name == "explicit" else ()

    def after_flags(self) -> tuple[str, ...]:
        """Arguments that override the user's, because the last one counts."""
        return ("--model-control-mode=explicit", "--load-model=*") if self.managed else ()


def _poll_seconds(flags: TritonFlags) -> float:
    text = flags.values.get("repository-poll-secs", str(_DEFAULT_STORE_POLL_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 1e6:
        raise ServerSetupError(
            f"--repository-poll-secs must be a number of seconds, got '{text}'", hint="--repository-poll-secs=15"
        )
    return seconds


_TRUE = {"true", "1", "on"}
# Address syntax of libevhtp and gRPC.
_IPV6_FORMS = {"http": "ipv6:{}", "metrics": "ipv6:{}", "grpc": "[{}]"}
_STORE_FLAGS = ("model-repository", "model-store")
_MANAGED_FLAGS = ("backend-directory",)  # set by graphkiln, to a folder that includes the user's
# Service name in tritonserver's flags -> protocol and default port.
SERVICES = {"http": ("HTTP", 8000), "grpc": ("gRPC", 8001), "metrics": ("metrics", 8002)}
_ANY_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - all interfaces -> loopback
DEFAULT_HOST = "127.0.0.1"  # tritonserver's default is every interface


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenAddress:
    """A listen address of the server.

    Attributes:
        protocol: `HTTP`, `gRPC` or `metrics`.
        host: IPv4 or IPv6 address, or a host name.
        port: TCP port.
    """

    protocol: str
    host: str
    port: int

    @property
    def local_address(self) -> tuple[str, int]:
        """Host and port for connections from this machine."""
        return (_ANY_HOSTS.get(self.host, self.host), self.port)

    @property
    def is_public(self) -> bool:
        """True if other machines can reach it."""
        return not is_local(self.host)

    def overlaps(self, other: ListenAddress) -> bool:
        """True if both have the same port, and the same host or all interfaces."""
        hosts = {DEFAULT_HOST if host == "localhost" else host for host in (self.host, other.host)}
        return self.port == other.port and (len(hosts) == 1 or bool(hosts & {*_ANY_HOSTS}))


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonFlags:
    """The user's flags for tritonserver.

    Attributes:
        arguments: As typed, in order, without the model stores.
        values: Flag -> its last value.
        stores: Model stores given by tritonserver's flags, or as plain paths.
        backends: The user's backend directory, or None.
        repeated_values: Flag -> all its values.
        default_host: Listen address of services without a flag.
        others: Words that are neither flags nor stores, such as the address of the page.
    """

    arguments: tuple[str, ...]
    values: dict[str, str]
    stores: tuple[Path | RemoteAddress, ...]
    backends: Path | None
    repeated_values: dict[str, list[str]] = field(default_factory=dict)
    default_host: str = DEFAULT_HOST
    others: tuple[str, ...] = ()

    @classmethod
    def parse(
        cls,
        arguments: Sequence[str],
        known: dict[str, bool],
        host: str = DEFAULT_HOST,
        *,
        is_other: Callable[[str], bool] = lambda _: False,
    ) -> TritonFlags:
        """Parse an argument list.

        Args:
            arguments: `--flag=value`, `--flag value` or `--flag`; a path is a model store.
            known: tritonserver's flags -> whether they take a value.
            host: Listen address of services without a flag.
            is_other: True for words that belong to `others`.

        Raises:
            ServerSetupError: A flag is unknown (the error suggests the nearest) or lacks its value, or an argument is
                neither a flag nor a path.
        """
        kept: list[str] = []
        values: dict[str, str] = {}
        repeated: dict[str, list[str]] = {}
        stores: list[Path | RemoteAddress] = []
        others: list[str] = []
        rest = list(arguments)
        while rest:
            argument = rest.pop(0)
            if not argument.startswith("-") and (is_remote(argument) or Path(argument).exists()):
                stores.append(parse_store(argument))
                continue
            if is_other(argument):
                others.append(argument)
                continue
            name, equals, value = argument.removeprefix("--").partition("=")
            _check_known(argument, name, known)
            words = [argument]
            if known[name] and not equals:
                if not rest:
                    raise ServerSetupError(f"--{name} needs a value", hint=f"--{name}=VALUE")
                value = rest.pop(0)
                words.append(value)
            if name in _STORE_FLAGS:
                stores.append(parse_store(value))
                continue
            values[name] = value
            repeated.setdefault(name, []).append(value)
            if name not in _MANAGED_FLAGS:
                kept += words
        backends = Path(values["backend-directory"]) if "backend-directory" in values else None
        return cls(
            arguments=tuple(kept),
            values=values,
            stores=tuple(stores),
            backends=backends,
            repeated_values=repeated,
            default_host=host,
            others=tuple(others),
        )

    def listen_address(self, service: str) -> ListenAddress | None:
        """Listen address of `http`, `grpc` or `metrics`; None if it is off.

        Raises:
            ServerSetupError: The port is not a number.
        """
        if not self.is_on(service):
            return None
        protocol, default_port = SERVICES[service]
        port = self.values.get(f"{service}-port", str(default_port))
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ServerSetupError(
                f"--{service}-port must be a port number, got '{port}'", hint=f"--{service}-port={default_port}"
            )
        return ListenAddress(protocol=protocol, host=self._host(service), port=int(port))

    def is_on(self, service: str, default: str = "true") -> bool:
        """True if a service is on."""
        return self.values.get(f"allow-{service}", default).lower() in _TRUE

    def _host(self, service: str) -> str:
        """By tritonserver's rule, the default host of metrics is that of HTTP."""
        default = self.values.get("http-address", self.default_host) if service == "metrics" else self.default_host
        return self.values.get(f"{service}-address", default).removeprefix("ipv6:").strip("[]")

    @property
    def addresses(self) -> dict[str, str]:
        """Address flags that the user did not give, with values."""
        names = {service: f"{service}-address" for service in ("http", "grpc")}
        return {
            name: spelled_for(service, self.default_host) for service, name in names.items() if name not in self.values
        }

    def on_loopback(self, services: Iterable[str], reserved: Iterable[ListenAddress] = ()) -> TritonFlags:
        """Flags with services on free ports of the loopback interface.

        Args:
            services: `http`, `grpc` and `metrics`; those that are off stay off.
            reserved: Addresses whose ports are not chosen, besides those of these flags.
        """
        taken = {address.port for address in (*self.listen_addresses(), *reserved)}
        moved: dict[str, str] = {}
        for name in filter(self.is_on, services):
            port = next(port for port in iter(free_port, 0) if port not in taken)
            taken.add(port)
            moved |= {f"{name}-address": DEFAULT_HOST, f"{name}-port": str(port)}
        arguments = (*self.arguments, *(f"--{name}={value}" for name, value in moved.items()))  # the last one counts
        return replace(self, arguments=arguments, values={**self.values, **moved})

    def listen_addresses(self) -> list[ListenAddress]:
        """All listen addresses of the server."""
        return [address for service in SERVICES if (address := self.listen_address(service))]

    def check_ports(self, page: ListenAddress | None = None) -> None:
        """Check that every port is free, by binding it once.

        Args:
            page: Address of the page, which must differ but is not bound.

        Raises:
            ServerSetupError: A port is in use, not allowed, or used twice; the hint suggests a free one.
        """
        taken = [page] if page else []
        for service in SERVICES:
            address = self.listen_address(service)
            if address is None:
                continue
            check_distinct(service, address, taken)
            taken.append(address)
            if not self.shares(service):
                check_free(service, address)

    def shares(self, service: str) -> bool:
        """True if the user allows several servers to share the port of a service."""
        return self.values.get(f"reuse-{service}-port", "false").lower() in _TRUE


def check_distinct(service: str, address: ListenAddress, taken: Sequence[ListenAddress]) -> None:
    """Refuse one port for two services, which would pass `check_free`.

    Raises:
        ServerSetupError: The address overlaps with another one.
    """
    for other in taken:
        if other.overlaps(address):
            raise ServerSetupError(
                f"{other.protocol} and {address.protocol} cannot both listen on port {address.port}",
                hint=f"--{service}-port={free_port()}",
            )


def spelled_for(service: str, host: str) -> str:
    """Format a host for tritonserver's flags of `http`, `grpc` or `metrics`."""
    return _IPV6_FORMS[service].format(host) if ":" in host else host


def _near_folder(argument: str) -> str:
    """Hint for a path that does not exist."""
    path = Path(argument)
    there = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = nearest(path.name, there)
    return f"did you mean '{path.parent / near}'?" if near else f"to serve a folder: --model-store {argument}"


def _check_known(argument: str, name: str, known: dict[str, bool]) -> None:
    if not argument.startswith("--"):
        raise ServerSetupError(f"unexpected argument '{argument}'", hint=_near_folder(argument))
    if name not in known:
        otherwise = "graphkiln serve --help lists the flags"
        raise ServerSetupError(
            f"neither graphkiln nor tritonserver has a flag '--{name}'",
            hint=did_you_mean(name, known, prefix="--", otherwise=otherwise),
        )


def check_free(service: str, address: ListenAddress) -> None:
    """Check that a port is free, by binding it once.

    Raises:
        ServerSetupError: It is in use or not allowed; the hint suggests a free one.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address.host, address.port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ServerSetupError(
                    f"cannot listen on {address.host}:{address.port} ({address.protocol}): {error.strerror}",
                    hint=f"choose another address with --{service}-address or port with --{service}-port",
                ) from error
            raise ServerSetupError(
                f"port {address.port} ({address.protocol}) is in use",
                hint=f"stop the program that uses it, or choose another: --{service}-port={free_port()}",
            ) from error


@contextmanager
def reserved_port() -> Iterator[int]:
    """Reserve a free TCP port of the loopback interface for a program that listens there after a while.

    The program must set SO_REUSEADDR, as tritonserver does. Source: socket(7), "SO_REUSEADDR".
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((DEFAULT_HOST, 0))
        yield int(holder.getsockname()[1])


def free_port() -> int:
    """Find a free TCP port."""
    with socket.socket() as listener:
        listener.bind((DEFAULT_HOST, 0))
        return int(listener.getsockname()[1])
