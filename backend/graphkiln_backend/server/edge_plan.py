"""Plan of the edge: whether HAProxy is in front of tritonserver, and its configuration (`haproxy.cfg`, a template)."""

from __future__ import annotations

import dataclasses
import logging
import os
import resource
import shutil
import string
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.flags import DEFAULT_HOST, SERVICES, ListenAddress, TritonFlags, free_port
from graphkiln_backend.server.tls import TlsFiles
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.triton.features import Feature, TritonFeatures

_log = logging.getLogger("graphkiln.server")

RESTARTING = "the server restarts, try again in a few seconds"
_MODES = ("auto", "on", "off")
_FILES = Path(__file__).parent
_PLACES = ("/usr/sbin", "/usr/local/sbin")  # Debian's places, which are not on every user's PATH
_INSTALL = "apt-get install haproxy"
_NO_EDGE = (
    "no edge: %s can be reached by other machines without limits for slow senders, and a stop or restart refuses their "
    "connections (%s)"
)
_SLOW_S = 10  # time limit for a request's header, and for the first 64 kB of its body
_MOST_THREADS = 4
_MOST_CONNECTIONS, _LEAST_CONNECTIONS = 16_384, 64
_OTHER_FILES = 128  # open files of HAProxy beside two for each connection


def find_haproxy() -> Path | None:
    """Path of HAProxy, or None if it is not installed."""
    found = shutil.which("haproxy", path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_PLACES)))
    return Path(found) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgePlan:
    """Plan of an edge: its addresses, TLS, limits and guarded endpoints.

    Attributes:
        program: Path of HAProxy.
        public: The user's flags, whose addresses the edge listens on.
        inner: Flags of tritonserver behind the edge.
        access: Endpoints that need the admin key.
        tls: Certificate, key and client authorities; None for plain connections.
        rate: Maximum requests per second from one address; 0 for no limit.
        whole_bodies: Refuse bodies above 32 kB without Content-Length.
    """

    program: Path
    public: TritonFlags
    inner: TritonFlags
    access: Access = dataclasses.field(default_factory=Access)
    tls: TlsFiles | None = None
    rate: int = 0
    whole_bodies: bool = True

    @classmethod
    def choose(
        cls,
        mode: str,
        flags: TritonFlags,
        access: Access,
        tls: TlsFiles | None,
        *,
        rate: int = 0,
        features: TritonFeatures | None = None,
    ) -> EdgePlan | None:
        """Decide whether to use an edge; return None for no edge.

        Args:
            mode: `auto`, `on` or `off`.
            flags: The user's flags.
            access: Endpoints that need the admin key.
            tls: The files of the TLS options.
            rate: Maximum requests per second from one address; 0 for no limit.
            features: Features of tritonserver; None if its version is unknown.

        Raises:
            ServerSetupError: An edge is needed, but turned off or not installed.
        """
        if mode not in _MODES:
            raise ServerSetupError(f"--edge {mode}: no such mode", hint=did_you_mean(mode, _MODES))
        program = find_haproxy() if mode != "off" else None
        public = [f"{address.host}:{address.port}" for address in flags.listen_addresses() if address.is_public]
        needed = f"--edge {mode}" if mode == "on" else "TLS" if tls else "--edge-rate" if rate else ""
        if mode == "auto" and not (public or needed):
            return None
        if program is None:
            hint = "leave out --edge off" if mode == "off" else _INSTALL
            if needed:
                raise ServerSetupError(f"{needed} needs HAProxy, which is not used or not installed", hint=hint)
            if public:
                _log.warning(_NO_EDGE, ", ".join(public), hint)
            return None
        return cls(
            program=program,
            public=flags,
            inner=behind_edge(flags),
            access=access,
            tls=tls,
            rate=rate,
            whole_bodies=not (features and features.has(Feature.LIMITS_CHUNKS)),
        )

    def services(self) -> dict[str, ListenAddress]:
        """The services behind the edge, with their public addresses."""
        return {name: address for name in fronted(self.public) if (address := self.public.listen_address(name))}

    def configuration(self, folder: Path, descriptors: Mapping[str, object], *, admits: bool = False) -> str:
        """Fill in HAProxy's configuration, which contains no secrets.

        Args:
            folder: Folder of the edge's private files.
            descriptors: File descriptors of the sockets of the services, and of `control`.
            admits: Whether requests are admitted from the start.
        """
        inner = {name: self.inner.listen_address(name) for name in self.services()}
        private = {name: f"{address.host}:{address.port}" for name, address in inner.items() if address}
        return self._render(folder, descriptors, private, admits=admits)

    def shown(self) -> str:
        """The configuration for people, with placeholders for values that are chosen at the start."""
        names = tuple(self.services())
        descriptors = {name: f"<{name}>" for name in ("control", *names)}
        private = {name: f"{DEFAULT_HOST}:<free port for {name}>" for name in names}
        return self._render(Path("PRIVATE-FOLDER"), descriptors, private, admits=False)

    def _render(
        self, folder: Path, descriptors: Mapping[str, object], private: Mapping[str, str], *, admits: bool
    ) -> str:
        services = self.services()
        values: dict[str, object] = {
            "connections": _connections(),
            "threads": max(1, min(_MOST_THREADS, usable_cores())),
            "slow_s": _SLOW_S,
            "restarting": RESTARTING,
            "http_header": HTTP_HEADER,
            "grpc_header": GRPC_HEADER,
            "rate": self.rate,
            "key": folder / "key",
            "lua": _FILES / "refuse.lua",
            "certificate": folder / "server.pem",
            "authorities": folder / "clients.pem",
            "control": descriptors["control"],
            "closed": "" if admits else " disabled",
        }
        for name, address in services.items():
            values |= {
                f"{name}_fd": descriptors[name],
                f"{name}_public": f"{address.host}:{address.port}",
                f"{name}_private": private[name],
            }
        return _fill(_template(), self._tags(services), values)

    def _tags(self, services: Mapping[str, ListenAddress]) -> set[str]:
        tags = {*services}
        tags.add("plain" if not self.tls else "mutual-tls" if self.tls.client_authorities else "server-tls")
        if self.tls:
            tags.add("tls")
        if self.rate:
            tags.add("rate")
        if self.whole_bodies:
            tags.add("whole-bodies")
        for protocol, endpoints in self.access.guarded.items():
            tags |= {f"{protocol}:{endpoint}" for endpoint in endpoints}
            if endpoints:
                tags.add(f"{protocol}-guard")
        return tags


def fronted(flags: TritonFlags) -> list[str]:
    """Services that can be behind an edge: not gRPC with the user's own TLS, which tritonserver terminates."""
    own_tls = flags.values.get("grpc-use-ssl", "false").lower() not in {"false", "0", "off"}
    return [name for name in SERVICES if flags.is_on(name) and not (name == "grpc" and own_tls)]


def behind_edge(flags: TritonFlags) -> TritonFlags:
    """Flags of a tritonserver behind the edge, on free ports of the loopback interface."""
    taken = {address.port for address in flags.listen_addresses()}
    moved: dict[str, str] = {}
    for name in fronted(flags):
        port = next(port for port in iter(free_port, 0) if port not in taken)
        taken.add(port)
        moved |= {f"{name}-address": DEFAULT_HOST, f"{name}-port": str(port)}
    arguments = (*flags.arguments, *(f"--{name}={value}" for name, value in moved.items()))
    return dataclasses.replace(flags, arguments=arguments, values={**flags.values, **moved})


def _connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = soft if soft != resource.RLIM_INFINITY else _MOST_CONNECTIONS * 2 + _OTHER_FILES
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, (files - _OTHER_FILES) // 2))


def _template() -> str:
    return (_FILES / "haproxy.cfg").read_text()


def _fill(template: str, tags: set[str], values: Mapping[str, object]) -> str:
    """Keep the lines and sections without a tag or with one of the tags, and substitute the values."""
    sections = []
    for section in template.split("\n\n"):
        lines = section.splitlines()
        tagged = [(line, tag) for line, _, tag in (line.partition("  #? ") for line in lines)]
        head = next((tag for line, tag in tagged if not line.startswith("#")), "")
        if not head or head in tags:
            sections.append("\n".join(line for line, tag in tagged if not tag or tag in tags))
    return string.Template("\n\n".join(sections) + "\n").substitute(values)
