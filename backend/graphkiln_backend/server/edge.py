"""The edge: HAProxy in front of tritonserver, if other machines can reach the server or it serves TLS.

HAProxy is a child process of the supervisor and survives restarts of tritonserver, which then listens on loopback ports
only. Its behaviour is defined in `haproxy.cfg`: TLS, limits, the admin key, 503 while tritonserver starts. The
supervisor admits and refuses requests over HAProxy's control socket.

The public sockets and the control socket belong to this process and are inherited: while HAProxy is restarted, new
connections wait instead of being refused.
"""

from __future__ import annotations

import csv
import logging
import os
import signal
import socket
import subprocess
import threading
import time
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from itertools import count
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.edge_plan import EdgePlan
from graphkiln_backend.server.ports import listen
from graphkiln_backend.server.run_folder import temporary_parent
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.system.processes import end_with_parent, start
from graphkiln_backend.triton.environment import RUN_FOLDER_VARIABLE

_log = logging.getLogger("graphkiln.server")

# Backends in `haproxy.cfg` beside the one named after the service.
_FURTHER = {"http": "http-1.0", "grpc": "streams"}
_CHECK_S = 1.0
_PAUSE_S = 0.2  # before HAProxy is restarted
_LONG_PAUSE_S = 2.0  # the same after a life shorter than this
_RENEWAL_CHECKS = 5  # checks between two checks of the certificates
_ANSWER_S = 3.0
_START_S = 10.0
_SILENT_PROBES = 2  # consecutive unanswered probes that count as a hang
_SOFT_STOP_S = 1.0  # after which idle connections are closed


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
        self._retired: list[subprocess.Popen[bytes]] = []  # serve their last connections
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
        """Number of requests in flight, by backend of the configuration.

        Raises:
            OSError: HAProxy does not respond.
        """
        rows = csv.DictReader(self._ask("show stat").lstrip("# ").splitlines())
        counted = {"http", "grpc", *_FURTHER.values()}
        return {
            row["pxname"]: int(row["scur"]) for row in rows if row["svname"] == "BACKEND" and row["pxname"] in counted
        }

    def leave(self) -> None:
        """Stop listening. Connections are closed after their next response, idle ones by `close`."""
        self._closing.set()
        with self._lock:  # not during a hand-over
            self._leave_until = time.monotonic() + _SOFT_STOP_S
            for name in self._plan.services():
                self._sockets[name].close()  # HAProxy has the last copy, and accepts pending connections
            self._child.send_signal(signal.SIGUSR1)

    def close(self) -> None:
        """End HAProxy and its connections, after `leave`."""
        if not self._closing.is_set():
            self.leave()
        with suppress(subprocess.TimeoutExpired):
            self._child.wait(max(0.0, self._leave_until - time.monotonic()))
        for child in (self._child, *self._retired):
            child.kill()
        self._thread.join()
        self._child.wait()
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
        deadline = time.monotonic() + _START_S
        while self._child.poll() is None and time.monotonic() < deadline:
            with suppress(OSError):
                self._ask("show version")
                return
        self._child.kill()
        raise ServerSetupError(
            f"{self._plan.program} exited with code {self._child.wait()} at its start, or did not respond",
            hint="ulimit -n 4096 or more; or --edge off",
        )

    def _start(self) -> subprocess.Popen[bytes]:
        return start(
            self._command("-q", "-db"),
            env={**os.environ, RUN_FOLDER_VARIABLE: str(self._folder)},  # for `server.leftovers`
            pass_fds=[each.fileno() for each in self._sockets.values()],
            preexec_fn=end_with_parent,
        )

    def _apply(self) -> None:
        """Send the present state to HAProxy; `_watch` retries if HAProxy is being restarted."""
        if self._closing.is_set():
            return
        services = self._plan.services()
        backends = [*services, *(backend for service, backend in _FURTHER.items() if service in services)]
        with self._lock, suppress(OSError):  # locked, so that HAProxy gets the newest state last
            self._applied = False
            state = "ready" if self._admits else "maint"
            self._ask("; ".join(f"set server {backend}/triton state {state}" for backend in backends))
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
            _log.error("the edge (HAProxy) cannot be started, retrying: %s", error)
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

    def _renew_certificates(self) -> None:
        """Hand over to an HAProxy with the changed files; unusable files are ignored."""
        self._retired = [child for child in self._retired if child.poll() is None]
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
            try:
                self._sockets["control"] = self._listen_for_control()
                self._write_files()
                self._child, self._started_at = self._start(), time.monotonic()
                self._wait_for_first_answer()
            except (ServerSetupError, OSError):
                if self._sockets["control"] is not control:
                    self._sockets["control"].close()
                    Path(self._control).unlink()
                self._child, self._sockets["control"], self._control = before, control, path
                raise
            control.close()
            before.send_signal(signal.SIGUSR1)
            self._retired.append(before)


def open_edge(plan: EdgePlan | None) -> AbstractContextManager[Edge | None]:
    """Run the edge of a plan, if any, until the end of the block.

    Raises:
        ServerSetupError: A port is in use, or HAProxy rejects its configuration.
    """
    return Edge(plan) if plan else nullcontext()
