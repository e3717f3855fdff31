"""The edge: HAProxy in front of tritonserver, where the server can be reached by other machines or serves TLS.

HAProxy is a child of the supervisor and lives across tritonserver's restarts; tritonserver then listens on ports of
the loopback interface only. What HAProxy does is one file, `haproxy.cfg` beside this one: TLS, limits, the admin key,
503 while tritonserver starts. The supervisor opens and closes it at run time, over HAProxy's control socket.

The public sockets, and the control socket, belong to this process and are handed down: where HAProxy is started again,
clients that come meanwhile wait instead of being refused.
"""

from __future__ import annotations

import csv
import dataclasses
import logging
import os
import resource
import shutil
import signal
import socket
import string
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.flags import DEFAULT_HOST, SERVICES, ListenAddress, TritonFlags, free_port
from graphkiln_backend.server.ports import listen
from graphkiln_backend.server.run_folder import temporary_parent
from graphkiln_backend.server.tls import TlsFiles
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.system.processes import end_with_parent, start
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE
from graphkiln_backend.triton.features import Feature, TritonFeatures

_log = logging.getLogger("graphkiln.server")

RESTARTING = "the server restarts, try again in a few seconds"
_MODES = ("auto", "on", "off")

_FILES = Path(__file__).parent
_PLACES = ("/usr/sbin", "/usr/local/sbin")  # Debian's, which is not on every user's PATH
_INSTALL = "apt-get install haproxy"
_OPEN = (
    "no edge: %s can be reached by other machines without limits for slow senders, and a stop or restart refuses their "
    "connections (%s)"
)
_FURTHER = {"http": "http-1.0", "grpc": "streams"}  # backends of a service beside the one of its name
_SLOW_S = 10  # for a request's header, and for the first 64 kB of its body
_MOST_THREADS = 4
_MOST_CONNECTIONS, _LEAST_CONNECTIONS = 16_384, 64
_OTHER_FILES = 128  # of HAProxy, beside two for each connection
_LOOK_S = 1.0
_PAUSE_S = 0.2  # before HAProxy is started again
_LONG_PAUSE_S = 2.0  # the same for one that has lived no longer
_RENEWAL_LOOKS = 5  # between two looks at the certificates
_ANSWER_S = 3.0
_SILENT_PROBES = 2  # in a row: it hangs
_SOFT_STOP_S = 1.0  # a client that sends nothing for so long sees its connection closed


def find_haproxy() -> Path | None:
    """HAProxy's program, if it is installed."""
    found = shutil.which("haproxy", path=os.pathsep.join((os.environ.get("PATH", os.defpath), *_PLACES)))
    return Path(found) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class EdgePlan:
    """Plan of an edge: its addresses, TLS, limits and guarded endpoints.

    Attributes:
        program: HAProxy.
        public: The user's flags, with the addresses that the edge listens on.
        inner: tritonserver's flags behind it.
        access: Which endpoints need the admin key.
        tls: Certificate, key and authorities of clients; None for plain connections.
        rate: Most requests a second from one address; 0 for any number.
        whole_bodies: Refuse bodies of more than 32 kB that come without Content-Length.
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
        """Decide whether there is an edge.

        Args:
            mode: `auto`, `on` or `off`.
            flags: The user's.
            access: Which endpoints need the admin key.
            tls: From the options.
            rate: Most requests a second from one address; 0 for any number.
            features: Of tritonserver; None where its version is not known.

        Raises:
            ServerSetupError: It is asked for, or TLS needs it, and HAProxy is not installed.
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
                _log.warning(_OPEN, ", ".join(public), hint)
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
        """The services that the edge fronts, with their public addresses."""
        return {name: address for name in fronted(self.public) if (address := self.public.listen_address(name))}

    def configuration(self, folder: Path, descriptors: Mapping[str, object], *, admits: bool = False) -> str:
        """HAProxy's configuration; no secret is in it.

        Args:
            folder: Where the edge's private files are.
            descriptors: Of the sockets of its services, and of `control`.
            admits: Let requests through from the beginning.
        """
        services = self.services()
        values = {
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
            inner = self.inner.listen_address(name)
            values |= {
                f"{name}_fd": descriptors[name],
                f"{name}_public": f"{address.host}:{address.port}",
                f"{name}_private": f"{inner.host}:{inner.port}" if inner else "",
            }
        return _fill(_template(), self._tags(services), values)

    def shown(self) -> str:
        """The configuration for people, with words in place of what a start chooses."""
        names = ("control", *self.services())
        return self.configuration(Path("PRIVATE-FOLDER"), {name: f"<{name}>" for name in names})

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
    """The services that can be behind an edge: not gRPC with the user's own TLS, which tritonserver ends itself."""
    own_tls = flags.values.get("grpc-use-ssl", "false").lower() not in {"false", "0", "off"}
    return [name for name in SERVICES if flags.is_on(name) and not (name == "grpc" and own_tls)]


def behind_edge(flags: TritonFlags) -> TritonFlags:
    """The flags of a tritonserver behind the edge: on free ports of the loopback interface."""
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
    """Keep the lines and sections whose tags are asked for, and put the values in."""
    sections = []
    for section in template.split("\n\n"):
        lines = section.splitlines()
        tagged = [(line, tag) for line, _, tag in (line.partition("  #? ") for line in lines)]
        head = next((tag for line, tag in tagged if not line.startswith("#")), "")
        if not head or head in tags:
            sections.append("\n".join(line for line, tag in tagged if not tag or tag in tags))
    return string.Template("\n\n".join(sections) + "\n").substitute(values)


class Edge(Closeable):
    """A running HAProxy, which lets no request through before `admit`.

    Args:
        plan: What it does.

    Raises:
        ServerSetupError: A port is in use, or HAProxy refuses its configuration.
    """

    def __init__(self, plan: EdgePlan) -> None:
        self._plan = plan
        self._admits = False
        self._applied = True
        self._silent = 0
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        self._leave_until = 0.0
        self._closing = threading.Event()
        self._stamp = plan.tls.stamp() if plan.tls else ()
        self._resources = ExitStack()
        try:
            self._folder = self._resources.enter_context(OwnedFolder(temporary_parent())).path
            self._sockets = {"control": self._listen_for_control()}
            for name, address in plan.services().items():
                shared = plan.public.shares(name)
                self._sockets[name] = self._resources.enter_context(listen(address, shared=shared))
            self._write_files()
            self._check()
            self._child = self._start()
            self._wait_for_first_answer()
        except BaseException:
            self._resources.close()
            raise
        self._thread = threading.Thread(target=self._watch, name="graphkiln-edge")
        self._thread.start()

    @property
    def pid(self) -> int:
        """HAProxy's process."""
        return self._child.pid

    def admit(self) -> None:
        """Let requests through: tritonserver is live."""
        self._admits = True
        self._apply()

    def refuse(self) -> None:
        """Respond to new requests with 503 and UNAVAILABLE; those that tritonserver has begun go on."""
        self._admits = False
        self._apply()

    def in_flight(self) -> dict[str, int]:
        """The number of requests that tritonserver has begun, by backend of the configuration.

        Raises:
            OSError: HAProxy does not respond.
        """
        rows = csv.DictReader(self._ask("show stat").lstrip("# ").splitlines())
        counted = {"http", "grpc", *_FURTHER.values()}
        return {
            row["pxname"]: int(row["scur"]) for row in rows if row["svname"] == "BACKEND" and row["pxname"] in counted
        }

    def leave(self) -> None:
        """Stop listening. Connections are closed after their next response, the silent ones by `close`."""
        self._closing.set()
        self._leave_until = time.monotonic() + _SOFT_STOP_S
        for name in self._plan.services():
            self._sockets[name].close()  # HAProxy's copy is the last one, and it takes what has come to it
        self._child.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """End HAProxy and its connections; in order where `leave` has not begun that."""
        if not self._closing.is_set():
            self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, self._leave_until - time.monotonic()))
        self._child.kill()
        self._thread.join()
        self._child.wait()
        self._resources.close()

    def _listen_for_control(self) -> socket.socket:
        """By the descriptor of the folder: its path may be longer than a Unix socket's may be. See unix(7)."""
        control = self._resources.enter_context(socket.socket(socket.AF_UNIX))
        descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
        self._resources.callback(os.close, descriptor)
        self._control = f"/proc/self/fd/{descriptor}/control"
        control.bind(self._control)
        control.listen()
        return control

    def _write_files(self) -> None:
        key, tls = self._plan.access.key, self._plan.tls
        if key:
            self._write("key", f"{key.value}\n")
        if tls:
            self._write("server.pem", tls.bundle())
            self._write("clients.pem", tls.authorities())
        self._write_configuration()

    def _write_configuration(self) -> None:
        descriptors = {name: each.fileno() for name, each in self._sockets.items()}
        self._write("haproxy.cfg", self._plan.configuration(self._folder, descriptors, admits=self._admits))

    def _write(self, name: str, text: str) -> None:
        """Write a file that only this user can read."""
        part = self._folder / f"{name}.part"
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
        part.rename(self._folder / name)

    def _command(self, *options: str) -> list[str | Path]:
        return [self._plan.program, *options, "-f", self._folder / "haproxy.cfg"]

    def _check(self) -> None:
        check = start(
            self._command("-c"),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[each.fileno() for each in self._sockets.values()],
        )
        printed, _ = check.communicate()
        if check.returncode:
            alerts = [line for line in printed.decode(errors="replace").splitlines() if "[ALERT]" in line]
            raise ServerSetupError(
                f"{self._plan.program} refuses its configuration: {'; '.join(alerts[:1]) or printed.decode()}",
                hint="HAProxy 2.6 or later with OpenSSL and the Prometheus exporter, as Debian's; or --edge off",
            )

    def _wait_for_first_answer(self) -> None:
        """A configuration that is right may still need more than the system allows, such as open files."""
        while self._child.poll() is None:
            with suppress(OSError):
                self._ask("show version")
                return
        raise ServerSetupError(
            f"{self._plan.program} ended with code {self._child.returncode} as soon as it was started",
            hint="ulimit -n 4096 or more; or --edge off",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        return start(
            self._command("-q", "-db"),
            env={**os.environ, RUN_FOLDER_VARIABLE: str(self._folder)},  # `server.leftovers` finds it by that
            pass_fds=[each.fileno() for each in self._sockets.values()],
            preexec_fn=end_with_parent,
        )

    def _apply(self) -> None:
        """Open or close the way; `_watch` tries again where HAProxy is just being replaced."""
        if self._closing.is_set():
            return
        services = self._plan.services()
        backends = [*services, *(backend for service, backend in _FURTHER.items() if service in services)]
        with self._lock, suppress(OSError):  # locked, so that the newest state is the last one that HAProxy hears
            self._applied = False
            state = "ready" if self._admits else "maint"
            self._ask("; ".join(f"set server {backend}/triton state {state}" for backend in backends))
            self._applied = True

    def _ask(self, command: str) -> str:
        """Run commands of HAProxy's.

        Raises:
            OSError: HAProxy does not respond.
        """
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(_ANSWER_S)
            control.connect(self._control)
            control.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: control.recv(1 << 16), b"")).decode()

    def _watch(self) -> None:
        """Start HAProxy again where it ends or hangs, and hand it certificates that have changed."""
        looks = 0
        while not self._closing.is_set():
            try:
                code = self._child.wait(_LOOK_S)
            except subprocess.TimeoutExpired:  # it runs
                if self._closing.is_set():
                    break
                self._end_if_hung()
                if not self._applied:
                    self._apply()
                looks += 1
                if looks % _RENEWAL_LOOKS == 0:
                    self._take_up_certificates()
            else:
                self._start_again(code)
        # The kernel ends a child with the thread that started it (PR_SET_PDEATHSIG in prctl(2)): an HAProxy that this
        # thread started must reach the end of its soft stop.
        self._child.wait()

    def _start_again(self, code: int) -> None:
        lived_s = time.monotonic() - self._started_at
        if self._closing.wait(_PAUSE_S if lived_s > _LONG_PAUSE_S else _LONG_PAUSE_S):
            return
        _log.warning("the edge (HAProxy) ended with code %s: starting it again", code)
        self._silent, self._started_at = 0, time.monotonic()
        with suppress(OSError):  # a full disk: the state before is set below
            self._write_configuration()
        try:
            self._child = self._start()
        except OSError as error:
            _log.error("the edge (HAProxy) cannot be started, trying again: %s", error)
            return
        if self._closing.is_set():
            self._child.kill()
        self._apply()

    def _end_if_hung(self) -> None:
        try:
            self._ask("show version")
            self._silent = 0
        except OSError:
            self._silent += 1
        if self._silent >= _SILENT_PROBES:
            _log.warning("the edge (HAProxy) does not respond: ending it")
            self._child.kill()

    def _take_up_certificates(self) -> None:
        """Take up files that have changed; where they cannot be used, the old ones go on."""
        tls = self._plan.tls
        if not tls or (stamp := tls.stamp()) == self._stamp:
            return
        self._stamp = stamp
        try:
            tls.context()
            for kind, name, text in (
                ("cert", "server.pem", tls.bundle()),
                ("ca-file", "clients.pem", tls.authorities()),
            ):
                if text:
                    self._replace(kind, name, text)
        except (ServerSetupError, OSError) as error:
            _log.error("the changed certificate is not taken up, the one before serves on: %s", error)
        else:
            _log.info("the changed certificate is taken up")
            tls.warn_if_refused()

    def _replace(self, kind: str, name: str, text: str) -> None:
        path = self._folder / name
        printed = self._ask(f"set ssl {kind} {path} <<\n{text}\n") + self._ask(f"commit ssl {kind} {path}")
        if "Success" not in printed:
            raise ServerSetupError(" ".join(printed.split()))
        self._write(name, text)


def open_edge(plan: EdgePlan | None) -> AbstractContextManager[Edge | None]:
    """The edge of a plan, until the end of the block; nothing without one.

    Raises:
        ServerSetupError: A port is in use, or HAProxy refuses its configuration.
    """
    return Edge(plan) if plan else nullcontext()
