"""The edge: HAProxy in front of tritonserver, if other machines can reach the server or it serves TLS.

HAProxy is a child process of the supervisor and survives restarts of tritonserver, which then listens on loopback ports
only. Its behaviour is defined in `haproxy.cfg`, a template: TLS, limits, the admin key, 503 while tritonserver starts.
`EdgePlan` decides whether there is an edge and fills in the template; `Edge` runs it, and admits and refuses requests
over HAProxy's control socket.

The public sockets and the control socket belong to this process and are inherited: while HAProxy is restarted, new
connections wait instead of being refused.
"""

from __future__ import annotations

import csv
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
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.flags import DEFAULT_HOST, SERVICES, ListenAddress, TritonFlags
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
        inner: Flags of the services behind the edge: tritonserver's, and the supervisor's metrics port.
        access: Endpoints that need the admin key.
        tls: Certificate, key and client authorities; None for plain connections.
        rate: Maximum requests per second from one address; 0 for no limit.
        whole_bodies: Refuse bodies above 32 kB without Content-Length.
    """

    program: Path
    public: TritonFlags
    inner: TritonFlags
    access: Access = field(default_factory=Access)
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

    def configuration(
        self,
        folder: Path,
        descriptors: Mapping[str, object],
        private: Mapping[str, str] | None = None,
        *,
        admits: bool = False,
    ) -> str:
        """Fill in HAProxy's configuration, which contains no secrets.

        Args:
            folder: Folder of the edge's private files.
            descriptors: File descriptors of the sockets of the services, and of `control`.
            private: Addresses of the services of tritonserver; None for those of the plan.
            admits: Whether requests are admitted from the start.
        """
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
            inner = self.inner.listen_address(name)
            values |= {
                f"{name}_fd": descriptors[name],
                f"{name}_public": f"{address.host}:{address.port}",
                f"{name}_private": private[name] if private else f"{inner.host}:{inner.port}" if inner else "",
            }
        return _fill((_FILES / "haproxy.cfg").read_text(), self._tags(services), values)

    def shown(self) -> str:
        """The configuration for people, with placeholders for values that are chosen at the start."""
        names = tuple(self.services())
        descriptors = {name: f"<{name}>" for name in ("control", *names)}
        private = {name: f"{DEFAULT_HOST}:<free port for {name}>" for name in names}
        return self.configuration(Path("PRIVATE-FOLDER"), descriptors, private)

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
    """Flags of the services behind the edge, on free ports of the loopback interface."""
    return flags.on_loopback(fronted(flags))


def _connections() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = soft if soft != resource.RLIM_INFINITY else _MOST_CONNECTIONS * 2 + _OTHER_FILES
    return max(_LEAST_CONNECTIONS, min(_MOST_CONNECTIONS, (files - _OTHER_FILES) // 2))


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


# Backends in `haproxy.cfg` that lead to a service of tritonserver; the supervisor itself answers for metrics.
_BACKENDS = {"http": ("http", "http-1.0"), "grpc": ("grpc", "streams")}
_WITH_REQUESTS = {*_BACKENDS["http"], *_BACKENDS["grpc"]}
_CHECK_S = 1.0
_PAUSE_S = 0.2  # before HAProxy is restarted
_LONG_PAUSE_S = 2.0  # the same after a life shorter than this
_RENEWAL_CHECKS = 5  # checks between two checks of the certificates
_ANSWER_S = 3.0
_START_S = 10.0
_SILENT_PROBES = 2  # consecutive unanswered probes that count as a hang
_SOFT_STOP_S = 1.0  # after which idle connections are closed
_PROMPT = b"\n> "  # end of a response after `prompt`


class _Retired:
    """A replaced HAProxy, which serves its last connections, with a control connection.

    An HAProxy that stops softly accepts no further control connections; an open one continues, and delays its exit.
    """

    def __init__(self, child: subprocess.Popen[bytes], control: str) -> None:
        self.child = child
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.settimeout(_ANSWER_S)
            self._socket.connect(control)
            self._converse("prompt")
        except OSError:
            self.release()
            raise

    def ask(self, command: str) -> str:
        """Run HAProxy commands; return an empty text if HAProxy has exited, or after `release`."""
        try:
            return self._converse(command)
        except OSError:
            self.release()
            return ""

    def release(self) -> None:
        """Close the control connection, so that HAProxy exits after its last connection."""
        self._socket.close()

    def _converse(self, command: str) -> str:
        self._socket.sendall(f"{command}\n".encode())
        response = b""
        while not response.endswith(_PROMPT):
            if not (part := self._socket.recv(1 << 16)):
                raise ConnectionResetError("HAProxy has exited")
            response += part
        return response.removesuffix(_PROMPT).decode()


def _sessions(statistics: str, kind: str) -> Counter[str]:
    """Current sessions by name of the frontend (`FRONTEND`) or backend (`BACKEND`), from the output of `show stat`."""
    rows = csv.DictReader(statistics.lstrip("# ").splitlines())
    return Counter({row["pxname"]: int(row["scur"]) for row in rows if row["svname"] == kind})


class Edge(Closeable):
    """A running HAProxy, which refuses requests until `admit`.

    Args:
        plan: Its configuration.

    Raises:
        ServerSetupError: A port is in use, or HAProxy rejects its configuration.
    """

    def __init__(self, plan: EdgePlan) -> None:
        self._plan = plan
        self._admits = False
        self._applied = True
        self._silent = 0
        self._started_at = time.monotonic()
        self._lock = threading.Lock()
        self._numbers = count()  # of control sockets
        self._retired: list[_Retired] = []
        self._leave_until = 0.0
        self._closing = threading.Event()
        self._stamp = plan.tls.stamp() if plan.tls else ()
        self._resources = ExitStack()
        try:
            self._folder = self._resources.enter_context(OwnedFolder(temporary_parent())).path
            self._descriptor = os.open(self._folder, os.O_RDONLY | os.O_CLOEXEC)
            self._resources.callback(os.close, self._descriptor)
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
        """Process id of HAProxy."""
        return self._child.pid

    def admit(self) -> None:
        """Admit requests: tritonserver is live."""
        self._admits = True
        self._apply()

    def refuse(self) -> None:
        """Answer new requests with 503 or UNAVAILABLE; requests in flight continue."""
        self._admits = False
        self._apply()

    def in_flight(self) -> dict[str, int]:
        """Number of requests in flight, by backend of the configuration, including those of replaced HAProxy processes.

        Raises:
            OSError: HAProxy does not respond.
        """
        counted = _sessions(self._ask("show stat"), "BACKEND")
        with self._lock:
            for retired in self._retired:
                counted.update(_sessions(retired.ask("show stat"), "BACKEND"))
        return {name: number for name, number in counted.items() if name in _WITH_REQUESTS}

    def leave(self) -> None:
        """Stop listening. Connections are closed after their next response, idle ones by `close`."""
        self._closing.set()
        with self._lock:  # not during a hand-over
            self._leave_until = time.monotonic() + _SOFT_STOP_S
            for name in self._plan.services():
                self._sockets[name].close()  # HAProxy has the last copy, and accepts pending connections
            self._child.send_signal(signal.SIGUSR1)
            for retired in self._retired:
                retired.release()

    def close(self) -> None:
        """End HAProxy and its connections, after `leave`."""
        try:
            if not self._closing.is_set():
                self.leave()
            with suppress(subprocess.TimeoutExpired):
                self._child.wait(max(0.0, self._leave_until - time.monotonic()))
        finally:  # also if a signal ends the wait
            self._closing.set()
            children = [self._child, *(retired.child for retired in self._retired)]
            for child in children:
                child.kill()
            self._thread.join()
            for child in (*children, self._child):  # the thread may have restarted HAProxy meanwhile
                child.wait()
            self._resources.close()

    def _listen_for_control(self) -> socket.socket:
        """Bind by the descriptor of the folder, because paths of Unix sockets are limited to 107 bytes. See unix(7)."""
        control = self._resources.enter_context(socket.socket(socket.AF_UNIX))
        self._control = f"/proc/self/fd/{self._descriptor}/control.{next(self._numbers)}"
        control.bind(self._control)
        control.listen()
        return control

    def _write_files(self) -> None:
        if key := self._plan.access.key:
            self._write("key", f"{key.value}\n")
        if tls := self._plan.tls:
            self._write("server.pem", tls.bundle())
            self._write("clients.pem", tls.authorities())
        self._write_configuration()

    def _write_configuration(self) -> None:
        descriptors = {name: each.fileno() for name, each in self._sockets.items()}
        self._write("haproxy.cfg", self._plan.configuration(self._folder, descriptors, admits=self._admits))

    def _write(self, name: str, text: str) -> None:
        """Write a file readable by this user only."""
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
                f"{self._plan.program} rejects its configuration: {'; '.join(alerts[:1]) or printed.decode()}",
                hint="HAProxy 2.6 or later with OpenSSL and the Prometheus exporter, as Debian's; or --edge off",
            )

    def _wait_for_first_answer(self) -> None:
        """Detect a start that fails in spite of a valid configuration, for example for lack of open files."""
        admits, deadline = self._admits, time.monotonic() + _START_S
        while self._child.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                self._ask("show version")
                return
            if self._closing.is_set() or self._admits != admits:  # `_apply` or `leave` waits for a hand-over
                self._child.kill()
                self._child.wait()
                raise InterruptedError("tritonserver is being started or stopped")
        self._child.kill()
        raise ServerSetupError(
            f"{self._plan.program} exited with code {self._child.wait()} at its start, or did not respond",
            hint="ulimit -n 4096 or more; or --edge off",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        return start(
            self._command("-q", "-db"),
            env={**os.environ, RUN_FOLDER_VARIABLE: str(self._folder)},  # for `server.run_folder`
            pass_fds=[each.fileno() for each in self._sockets.values()],
            preexec_fn=end_with_parent,
        )

    def _apply(self) -> None:
        """Send the current state to HAProxy; `_watch` retries if HAProxy is being restarted."""
        if self._closing.is_set():
            return
        backends = [backend for service in self._plan.services() for backend in _BACKENDS.get(service, ())]
        with self._lock, suppress(OSError):  # locked, so that HAProxy gets the newest state last
            self._applied = False
            state = "ready" if self._admits else "maint"
            commands = [f"set server {backend}/triton state {state}" for backend in backends]
            for retired in self._retired:
                for command in commands:  # a prompt follows each command
                    retired.ask(command)
            self._ask("; ".join(commands))
            self._applied = True

    def _ask(self, command: str) -> str:
        """Run HAProxy commands.

        Raises:
            OSError: HAProxy does not respond.
        """
        with socket.socket(socket.AF_UNIX) as control:
            control.settimeout(_ANSWER_S)
            control.connect(self._control)
            control.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: control.recv(1 << 16), b"")).decode()

    def _watch(self) -> None:
        """Restart HAProxy if it exits or hangs, and pass on changed certificates."""
        checks = 0
        while not self._closing.is_set():
            try:
                code = self._child.wait(_CHECK_S)
            except subprocess.TimeoutExpired:  # it runs
                if self._closing.is_set():
                    break
                self._kill_if_hung()
                if not self._applied:
                    self._apply()
                checks += 1
                if checks % _RENEWAL_CHECKS == 0:
                    self._release_retired()
                    self._renew_certificates()
            else:
                self._restart(code)
        # The kernel kills a child when the thread that started it ends (PR_SET_PDEATHSIG in prctl(2)), so this thread
        # waits for the soft stop of an HAProxy that it has started.
        self._child.wait()

    def _restart(self, code: int) -> None:
        lived_s = time.monotonic() - self._started_at
        if self._closing.wait(_PAUSE_S if lived_s > _LONG_PAUSE_S else _LONG_PAUSE_S):
            return
        _log.warning("the edge (HAProxy) exited with code %s: restarting it", code)
        self._silent, self._started_at = 0, time.monotonic()
        with suppress(OSError):  # a full disk: `_apply` sets the state
            self._write_configuration()
        try:
            self._child = self._start()
        except OSError as error:
            _log.error("the edge (HAProxy) failed to start, trying again: %s", error)
            return
        if self._closing.is_set():
            self._child.kill()
        self._apply()

    def _kill_if_hung(self) -> None:
        try:
            self._ask("show version")
            self._silent = 0
        except OSError:
            self._silent += 1
        if self._silent >= _SILENT_PROBES:
            _log.warning("the edge (HAProxy) does not respond: restarting it")
            self._child.kill()

    def _release_retired(self) -> None:
        """Let replaced HAProxy processes without connections exit."""
        with self._lock:
            for retired in list(self._retired):
                if not any(_sessions(retired.ask("show stat"), "FRONTEND").values()):
                    retired.release()
                if retired.child.poll() is not None:
                    retired.release()
                    self._retired.remove(retired)

    def _renew_certificates(self) -> None:
        """Hand over to an HAProxy with the changed files; unusable files are ignored."""
        tls = self._plan.tls
        if not tls or (stamp := tls.stamp()) == self._stamp:
            return
        try:
            tls.context()
            self._hand_over()
        except ServerSetupError as error:
            _log.error("the changed certificate cannot be used, the old one stays: %s", error)
        except OSError as error:  # such as a full disk
            _log.error("the changed certificate cannot be used yet, retrying: %s", error)
            return
        else:
            _log.info("the changed certificate is in use")
            tls.warn_if_refused()
        self._stamp = stamp

    def _hand_over(self) -> None:
        """Start another HAProxy on the same public sockets; the old one ends its connections in order.

        HAProxy can replace certificates at run time (`commit ssl cert`), but 2.6.12 then loses ALPN, and with it gRPC.

        Raises:
            ServerSetupError: The other HAProxy does not start; the old one goes on.
            OSError: A file cannot be written.
        """
        with self._lock:
            if self._closing.is_set():
                return
            before, control, path = self._child, self._sockets["control"], self._control
            retired = _Retired(before, path)
            try:
                self._sockets["control"] = self._listen_for_control()
                self._write_files()
                self._child, self._started_at = self._start(), time.monotonic()
                self._wait_for_first_answer()
            except (ServerSetupError, OSError):
                retired.release()
                if self._sockets["control"] is not control:
                    self._sockets["control"].close()
                    Path(self._control).unlink()
                self._child, self._sockets["control"], self._control = before, control, path
                raise
            control.close()
            before.send_signal(signal.SIGUSR1)
            self._retired.append(retired)


def open_edge(plan: EdgePlan | None) -> AbstractContextManager[Edge | None]:
    """Run the edge of a plan, if any, until the end of the block.

    Raises:
        ServerSetupError: A port is in use, or HAProxy rejects its configuration.
    """
    return Edge(plan) if plan else nullcontext()
