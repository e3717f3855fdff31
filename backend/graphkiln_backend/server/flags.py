"""tritonserver's own flags: checked against its `--help`, and passed on as typed."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
        poll_s: Seconds between two looks at the stores, in poll mode.
        managed: Whether graphkiln decides what Triton sees, over its repository API; impossible without HTTP and gRPC.
        completes: Whether graphkiln completes configurations: not against the user's flags.
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
        if name not in _NAMES:  # Triton would print all of its flags
            raise ServerSetupError(
                f"unknown --model-control-mode '{name}'",
                hint=did_you_mean(name, _NAMES),
            )
        ours = name in {"none", "poll"} and "load-model" not in flags.values  # the rest is Triton's to refuse
        return cls(
            name=name,
            poll_s=_poll_seconds(flags),
            managed=ours and any(flags.listen_address(service) for service in ("http", "grpc")),
            completes=not _RAW_FLAGS & flags.values.keys(),
        )

    def before_flags(self) -> tuple[str, ...]:
        """Arguments that the user's own may overrule."""
        return ("--exit-on-error=false",) if self.managed or self.name == "explicit" else ()

    def after_flags(self) -> tuple[str, ...]:
        """Arguments that overrule the user's own: the last one counts."""
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
# As libevhtp and gRPC want them, which tritonserver hands its addresses to.
_IPV6_FORMS = {"http": "ipv6:{}", "metrics": "ipv6:{}", "grpc": "[{}]"}
_STORE_FLAGS = ("model-repository", "model-store")
_MANAGED_FLAGS = ("backend-directory",)  # set by graphkiln itself, to a folder that holds what the user's value names
# tritonserver's name of a service in its flags -> protocol and default port.
SERVICES = {"http": ("HTTP", 8000), "grpc": ("gRPC", 8001), "metrics": ("metrics", 8002)}
_ANY_HOSTS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - all interfaces -> the one to ask by
DEFAULT_HOST = "127.0.0.1"  # in place of tritonserver's own default, which is every interface


@dataclass(frozen=True, kw_only=True, slots=True)
class ListenAddress:
    """An address that the server will listen on.

    Attributes:
        protocol: `HTTP`, `gRPC` or `metrics`.
        host: An IPv4 or IPv6 address, or a host name.
        port: The TCP port.
    """

    protocol: str
    host: str
    port: int

    @property
    def local_address(self) -> tuple[str, int]:
        """Host and port by which this machine reaches it."""
        return (_ANY_HOSTS.get(self.host, self.host), self.port)

    @property
    def is_public(self) -> bool:
        """True if other machines can reach it."""
        return not is_local(self.host)

    def overlaps(self, other: ListenAddress) -> bool:
        """True if a program cannot listen on both: one port, and one host or every one."""
        hosts = {DEFAULT_HOST if host == "localhost" else host for host in (self.host, other.host)}
        return self.port == other.port and (len(hosts) == 1 or bool(hosts & {*_ANY_HOSTS}))


@dataclass(frozen=True, kw_only=True, slots=True)
class TritonFlags:
    """The flags that a user gave for tritonserver.

    Attributes:
        arguments: As typed, in order, without the model stores.
        values: Flag -> its last value.
        stores: Model stores given by tritonserver's own flag names, or as paths alone.
        backends: A backend directory given by the user, or None.
        repeated_values: Flag -> all its values, of flags that may be given several times.
        default_host: Where services listen whose address the user did not give.
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
        """Read an argument list.

        Args:
            arguments: `--flag=value`, `--flag value` or `--flag`; a path is a model store.
            known: tritonserver's flags -> whether they take a value.
            host: Where services listen whose address the arguments do not give.
            is_other: True for words that go to `others`.

        Raises:
            ServerSetupError: A flag is unknown (the nearest is named) or lacks its value, or an argument is neither a
                flag nor a path.
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
        """The address of `http`, `grpc` or `metrics`, or None when it is switched off.

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
        """True if tritonserver will start a service."""
        return self.values.get(f"allow-{service}", default).lower() in _TRUE

    def _host(self, service: str) -> str:
        """Without another address, the metrics service listens where HTTP does: tritonserver's own rule."""
        default = self.values.get("http-address", self.default_host) if service == "metrics" else self.default_host
        return self.values.get(f"{service}-address", default).removeprefix("ipv6:").strip("[]")

    @property
    def addresses(self) -> dict[str, str]:
        """Values of the flags that say where services listen, where the user gave none."""
        names = {service: f"{service}-address" for service in ("http", "grpc")}
        return {
            name: spelled_for(service, self.default_host) for service, name in names.items() if name not in self.values
        }

    def listen_addresses(self) -> list[ListenAddress]:
        """All addresses that the server will listen on."""
        return [address for service in SERVICES if (address := self.listen_address(service))]

    def check_ports(self, page: ListenAddress | None = None) -> None:
        """Bind every port once, but those of the page.

        Raises:
            ServerSetupError: A port is in use, not allowed, or named for two services; the hint names a free one.
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
        """True if the user lets several servers listen on the port of a service."""
        return self.values.get(f"reuse-{service}-port", "false").lower() in _TRUE


def check_distinct(service: str, address: ListenAddress, taken: Sequence[ListenAddress]) -> None:
    """Refuse one port for two services: each of them would be free, until the first one listens.

    Raises:
        ServerSetupError: There is another one that would listen there.
    """
    for other in taken:
        if other.overlaps(address):
            raise ServerSetupError(
                f"{other.protocol} and {address.protocol} cannot both listen on port {address.port}",
                hint=f"--{service}-port={free_port()}",
            )


def spelled_for(service: str, host: str) -> str:
    """A host as tritonserver expects it, for `http`, `grpc` or `metrics`."""
    return _IPV6_FORMS[service].format(host) if ":" in host else host


def _near_folder(argument: str) -> str:
    """A hint for a path that leads nowhere."""
    path = Path(argument)
    there = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    near = nearest(path.name, there)
    return f"did you mean '{path.parent / near}'?" if near else f"to serve a folder: --model-store {argument}"


def _check_known(argument: str, name: str, known: dict[str, bool]) -> None:
    if not argument.startswith("--"):
        raise ServerSetupError(f"unexpected argument '{argument}'", hint=_near_folder(argument))
    if name not in known:
        otherwise = "graphkiln serve --help names the flags"
        raise ServerSetupError(
            f"neither graphkiln nor tritonserver has a flag '--{name}'",
            hint=did_you_mean(name, known, prefix="--", otherwise=otherwise),
        )


def check_free(service: str, address: ListenAddress) -> None:
    """Bind a port once.

    Raises:
        ServerSetupError: It is in use or not allowed; the hint names a free one.
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
                hint=f"stop the program that holds it, or choose another: --{service}-port={free_port()}",
            ) from error


def free_port() -> int:
    """A TCP port that is free at the moment."""
    with socket.socket() as listener:
        listener.bind((DEFAULT_HOST, 0))
        return int(listener.getsockname()[1])
