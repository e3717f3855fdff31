"""Detect faults of a running server from outside: dead or hung processes, endless computing or loading.

Triton (24.10) does not detect them: it neither restarts a dead instance nor reports it as not ready, and a stopped
instance keeps its requests forever. Sources: the instances' status files (`triton.instance_status`), process states,
and one small request per second to the server.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.image_model import is_image_model
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.flags import ListenAddress, TritonFlags
from graphkiln_backend.server.run_folder import BACKEND_NAMES
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import process_age_s
from graphkiln_backend.triton.deadly_requests import find_dead_image_instance
from graphkiln_backend.triton.features import Feature, TritonFeatures
from graphkiln_backend.triton.instance_status import InstanceStatus, note_end
from graphkiln_backend.triton.rollout_files import tried_model
from graphkiln_backend.triton.snapshot import Snapshot, is_ready

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_log = logging.getLogger("graphkiln.server")

# Without a heartbeat or response for so long, a process counts as hung; a busy machine delays them by seconds.
SILENT_S = 20.0
_SUSPENDED_S = 5.0
# A stopped process (SIGSTOP) will not continue by itself: no need to wait for missing heartbeats.
_STOPPED_S = 1.5
_STUBS_EVERY_S = 1.0
# A process that died so soon after its start may have died before tritonserver knew of it.
_YOUNG_S = 10.0
# Other dead children are reaped by tritonserver within two seconds, or it serves without them.
_UNREAPED_S = 10.0
_STUB_PROGRAM = "triton_python_backend_stub"
_CONNECT_S = 0.5
_CLOCK_TICK_S = 0.1  # more than the resolution of the start times of processes


class Cause(StrEnum):
    """The cause of a restart: the label `cause` of the metric `graphkiln_restarts_total`."""

    INSTANCE_DIED = "instance_died"
    INSTANCE_HUNG = "instance_hung"
    COMPUTE_LIMIT = "compute_limit"
    WRONG_OUTPUTS = "wrong_outputs"
    LOAD_DEADLINE = "load_deadline"
    SERVER_DIED = "server_died"
    SERVER_HUNG = "server_hung"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """A fault that requires a restart of the server.

    Attributes:
        cause: Kind of fault.
        what: Description, to begin a log message.
        code: Exit code of the supervisor if it gives up.
        lasted_s: Seconds without service before it was found, if more than a few.
        instance: Instance whose requests may have caused the fault, as `instance.pid`; else empty.
    """

    cause: Cause
    what: str
    code: int = 1
    lasted_s: float = 0.0
    instance: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class TimeLimits:
    """Time limits in seconds.

    Attributes:
        compute: Limit for one batch, after which its instance counts as hung.
        load: Limit for loading a model version, after which its process is killed.
        drain: Limit for finishing the requests in flight after SIGTERM.
    """

    compute: float = 120.0
    load: float = 600.0
    drain: float = 5.0


def describe_exit(code: int) -> Fault:
    """Describe the exit of a server as a fault.

    Args:
        code: Exit code, or minus the number of the signal that killed it (as in `subprocess`).
    """
    if code >= 0:
        return Fault(cause=Cause.SERVER_DIED, what=f"tritonserver ended by itself with code {code}", code=code or 1)
    try:
        name = signal.Signals(-code).name
    except ValueError:  # a real-time signal
        name = f"signal {-code}"
    return Fault(cause=Cause.SERVER_DIED, what=f"tritonserver was killed by {name}", code=exit_code(code))


def exit_code(code: int) -> int:
    """Exit code as reported by a shell: 128 + N if signal N killed the process."""
    return code if code >= 0 else 128 - code


class Watchdog(Closeable):
    """Look for faults of one run of the server.

    Args:
        folder: Folder of the instances' status files.
        server: Process id of tritonserver.
        limits: Time limits.
        endless: Names of versions that exceeded the load limit; the watchdog adds to them and kills them at once.
        features: Features of the server.
    """

    def __init__(
        self, folder: Path, server: int, limits: TimeLimits, endless: set[str], features: TritonFeatures
    ) -> None:
        self._gives_up_stubs = features.has(Feature.GIVES_UP_SILENT_STUBS)
        self._folder = folder
        self._endless = endless
        self._server = server
        self._limits = limits
        self._stopped_since: dict[int, float] = {}
        self._suspension = SuspensionDetector()
        self._starvation = StarvationDetector()
        self._trust_from = 0.0
        self._probe: LivenessProbe | None = None
        self._ended: set[int] = set()
        self._seen_ready: set[int] = set()
        self._stubs: dict[int, tuple[str, float]] = {}
        self._stubs_at = 0.0
        self._died_early_since: dict[int, float] = {}

    def probe(self, flags: TritonFlags) -> None:
        """Begin to probe a live server, except over gRPC with the user's own TLS."""
        plain_grpc = None if "grpc-use-ssl" in flags.values else flags.listen_address("grpc")
        if address := flags.listen_address("http") or plain_grpc:
            self._probe = LivenessProbe(address)

    def close(self) -> None:
        """Stop probing."""
        if self._probe:
            self._probe.close()

    def look(self, instances: Snapshot) -> Fault | None:
        """Return the first fault found, or None. Call at least once a second.

        Args:
            instances: Current content of the status files.
        """
        now = time.monotonic()
        self._sample_stubs(now)
        if self._suspension.has_resumed():
            self._trust_from = now + SILENT_S / 2  # wait for a heartbeat of every instance
        users = replace(
            instances, statuses={key: each for key, each in instances.statuses.items() if not tried_model(each.model)}
        )
        states = {status.pid: _state(status.pid) for status in users.statuses.values()}
        return (
            self._find_stopped_server(now)
            or self._find_instance_fault(users, states, now)
            or self._find_dead_image_instance(instances)
            or self._find_early_death(now)
            or self._find_silent_server()
        )

    def find_failed_candidates(self, instances: Snapshot) -> dict[str, Fault]:
        """Return faults of instances of candidates in rollouts, by `instance.pid`; they need no restart.

        Args:
            instances: Current content of the status files.
        """
        found: dict[str, Fault] = {}
        for key, status in instances.statuses.items():
            if tried_model(status.model):
                one, states = replace(instances, statuses={key: status}), {status.pid: _state(status.pid)}
                starved_at = self._starvation.starved_at(status.pid)
                if fault := self._find_instance_fault(one, states, time.monotonic(), starved_at):
                    found[key] = fault
        return found

    def _find_instance_fault(
        self, instances: Snapshot, states: Mapping[int, str], now: float, starved_at: float = 0.0
    ) -> Fault | None:
        return (
            self._find_dead_instance(instances, states)
            or self._find_wrong_outputs(instances)
            or self._find_stopped_instance(instances, states, now)
            or self._find_hung_instance(instances, now, starved_at)
        )

    def end_endless_loading(self, instances: Snapshot) -> int:
        """Kill processes that exceed the load limit; their models fail, the others serve.

        Call it after `look`, which finds processes without a status file.

        Args:
            instances: Current content of the status files.

        Returns:
            Number of killed processes.
        """
        now = time.monotonic()
        ended = 0
        for process, (version, since) in self._follow_loading(instances).items():
            stopped = self._is_stopped(process, _state(process), now)
            is_overdue = stopped or version in self._endless or now - since > self._limits.load
            if is_overdue and _ran_at(process, since):
                self._ended.add(process)
                self._endless.add(version)
                why = "was stopped" if stopped else f"did not finish within {self._limits.load:g} s (--load-deadline)"
                with suppress(OSError):  # a full disk: it is logged, too
                    note_end(self._folder, process, f"loading {version} {why}")
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
                    ended += 1
                _log.error("loading %s %s: its process is killed", version, why)
        return ended

    def _sample_stubs(self, now: float) -> None:
        """Sample the stub processes about once a second; one may hang or die before it writes a status file."""
        if now - self._stubs_at <= _STUBS_EVERY_S:
            return
        self._stubs_at = now
        stubs = read_stubs(self._server)
        living = [stub for stub in stubs if not stub.ended]
        self._stubs = {stub.pid: (f"{stub.model} version {stub.version}", now - stub.age_s) for stub in living}
        ended = {stub.pid: stub.age_s for stub in stubs if stub.ended}
        # One that was ready is known to tritonserver, and may wait long for its end: its threads may need idle cores.
        early = {pid for pid, age_s in ended.items() if age_s < _YOUNG_S and pid not in self._seen_ready}
        since = {pid: now if pid in early else math.inf for pid in ended}
        self._died_early_since = {pid: self._died_early_since.get(pid, since[pid]) for pid in ended}

    def _follow_loading(self, instances: Snapshot) -> dict[int, tuple[str, float]]:
        """Record the ready processes; return the version and start time of each loading one."""
        self._seen_ready |= instances.ready
        files = instances.loading.values()
        loading = self._stubs | {file.pid: (f"{file.model} version {file.version}", file.since) for file in files}
        self._seen_ready &= loading.keys() | instances.ready  # process ids are reused
        self._ended &= loading.keys()
        return {
            process: what
            for process, what in loading.items()
            if process not in self._seen_ready and process not in self._ended
        }

    def _find_dead_instance(self, instances: Snapshot, states: Mapping[int, str]) -> Fault | None:
        for key, status in instances.statuses.items():
            if states[status.pid] == psutil.STATUS_ZOMBIE and is_ready(self._folder, key):  # not merely unloaded
                return Fault(cause=Cause.INSTANCE_DIED, what=f"{_name(status)} died", instance=key)
        return None

    def _find_dead_image_instance(self, instances: Snapshot) -> Fault | None:
        if key := find_dead_image_instance(self._folder, instances.statuses):
            name = key.rpartition("_")[0].rpartition("_")[0]  # Triton's names of instances: MODEL_GROUP_NUMBER
            return Fault(cause=Cause.INSTANCE_DIED, what=f"an instance of {name} died", instance=key)
        return None

    def _find_wrong_outputs(self, instances: Snapshot) -> Fault | None:
        for key, line in instances.faults.items():
            if status := instances.statuses.get(key):
                return Fault(cause=Cause.WRONG_OUTPUTS, what=f"{_name(status)} no longer serves ({line})")
        return None

    def _find_stopped_server(self, now: float) -> Fault | None:
        if self._is_stopped(self._server, _state(self._server), now):
            return Fault(cause=Cause.SERVER_HUNG, what="tritonserver was stopped by a signal")
        return None

    def _find_stopped_instance(self, instances: Snapshot, states: Mapping[int, str], now: float) -> Fault | None:
        for status in instances.statuses.values():
            if self._is_stopped(status.pid, states[status.pid], now):
                return Fault(cause=Cause.INSTANCE_HUNG, what=f"{_name(status)} was stopped by a signal")
        return None

    def _find_hung_instance(self, instances: Snapshot, now: float, starved_at: float) -> Fault | None:
        """Find an instance without progress since it last waited for a core."""
        if now < self._trust_from:
            return None
        for key, progress in instances.progress.items():
            status = instances.statuses.get(key)
            if not status:
                continue
            if now - max(progress.heartbeat, starved_at) > SILENT_S:
                what = f"{_name(status)} has hung for {SILENT_S:g} s"
                return Fault(cause=Cause.INSTANCE_HUNG, what=what, lasted_s=SILENT_S)
            if progress.computing and now - max(progress.begun_at, starved_at) > self._limits.compute:
                what = f"{_name(status)} has computed one batch for {self._limits.compute:g} s (--compute-limit)"
                return Fault(cause=Cause.COMPUTE_LIMIT, what=what, lasted_s=self._limits.compute, instance=key)
        return None

    def _find_early_death(self, now: float) -> Fault | None:
        """Detect a process that died before tritonserver knew of it, for which Triton before 25.08 waits forever."""
        if not self._gives_up_stubs and any(now - since > _UNREAPED_S for since in self._died_early_since.values()):
            return Fault(cause=Cause.INSTANCE_DIED, what="an instance died at its start")
        return None

    def _find_silent_server(self) -> Fault | None:
        if self._probe and self._probe.silent_s() > SILENT_S:
            what = f"tritonserver has not responded for {SILENT_S:g} s"
            return Fault(cause=Cause.SERVER_HUNG, what=what, lasted_s=SILENT_S)
        return None

    def _is_stopped(self, process: int, state: str, now: float) -> bool:
        """True if a process has been stopped for some time."""
        if state != psutil.STATUS_STOPPED:
            self._stopped_since.pop(process, None)
            return False
        return now - self._stopped_since.setdefault(process, now) > _STOPPED_S


def _name(status: InstanceStatus) -> str:
    return f"an instance of {status.model} version {status.version}"


def _state(process: int) -> str:
    """State as named by psutil; a missing process counts as a zombie."""
    try:
        return psutil.Process(process).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def _ran_at(process: int, at: float) -> bool:
    """True if a process runs and did so at a time: after a crash, its status file stays, and its id may be reused."""
    try:
        started_at = time.monotonic() - process_age_s(process)
    except OSError:
        return False
    return started_at < at + _CLOCK_TICK_S and _state(process) != psutil.STATUS_ZOMBIE


# Stub processes, including those without a status file.


@dataclass(frozen=True, kw_only=True, slots=True)
class Stub:
    """A process in which Triton runs graphkiln's backend.

    Attributes:
        pid: Process id.
        model: Model name.
        version: Model version.
        age_s: Seconds since its start.
        ended: Whether it is a zombie child of tritonserver; its command line is unknown then, so that it may be of
            another backend.
    """

    pid: int
    model: str
    version: str
    age_s: float
    ended: bool = False


def is_stub_of_others(process: psutil.Process) -> bool:
    """True for a process in which Triton runs a Python model that is not graphkiln's; false if it has just exited."""
    with suppress(psutil.Error):
        if model := _parse_stub(process.cmdline()):
            folder, backend = model
            return backend not in BACKEND_NAMES and not is_image_model(folder.parent.name)
    return False


def read_stubs(server: int) -> list[Stub]:
    """List the stubs of graphkiln's backend below a tritonserver, and its zombie children of any kind."""
    try:
        descendants = psutil.Process(server).children(recursive=True)
    except psutil.NoSuchProcess:
        return []
    found = (_read(process, server) for process in descendants)
    return [stub for stub in found if stub]


def _read(process: psutil.Process, server: int) -> Stub | None:
    try:
        age_s = process_age_s(process.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            is_own = process.ppid() == server
            return Stub(pid=process.pid, model="", version="", age_s=age_s, ended=True) if is_own else None
        model = _parse_stub(process.cmdline())
    except (psutil.Error, OSError):  # it has just exited
        return None
    if not model or model[1] not in BACKEND_NAMES:
        return None
    folder, _ = model
    return Stub(pid=process.pid, model=folder.parent.name, version=folder.name, age_s=age_s)


def _parse_stub(words: Sequence[str]) -> tuple[Path, str] | None:
    """Read `.../triton_python_backend_stub .../MODEL/VERSION/model.py ... .../BACKEND`: version folder and backend."""
    names = [Path(word).name for word in words]
    if _STUB_PROGRAM not in names[:-2]:
        return None
    return Path(words[names.index(_STUB_PROGRAM) + 1]).parent, names[-1]


# Liveness of the server.


class SuspensionDetector:
    """Detect that this process was suspended, so that missed heartbeats are not taken for hangs.

    Normally the time between two calls is about a second at most.
    """

    def __init__(self) -> None:
        self._called_at = time.monotonic()

    def has_resumed(self) -> bool:
        """True if this process has just resumed after a suspension. Call regularly."""
        before, self._called_at = self._called_at, time.monotonic()
        return self._called_at - before > _SUSPENDED_S


def core_use(process: int) -> tuple[float, float]:
    """Seconds for which the threads of a process have run, and have waited for a core.

    Source: Linux, "sched-stats", /proc/PID/schedstat: the first two numbers, in nanoseconds.
    """
    ran = waited = 0
    for file in Path(f"/proc/{process}/task").glob("*/schedstat"):
        with suppress(OSError, ValueError):  # the thread has ended, or the kernel does not count
            each, other, _ = map(int, file.read_text().split())
            ran, waited = ran + each, waited + other
    return ran / 1e9, waited / 1e9


class StarvationDetector:
    """Detect that a process waits for a core, so that an instance on idle cores is not taken for a hung one."""

    def __init__(self) -> None:
        self._waited: dict[int, tuple[float, float]] = {}
        self._starved_at: dict[int, float] = {}

    def starved_at(self, process: int) -> float:
        """When one of its threads last waited for most of the time between two calls; 0 if never. Call regularly."""
        now, (_, waited_s) = time.monotonic(), core_use(process)
        before_at, before_s = self._waited.get(process, (now, waited_s))
        self._waited[process] = now, waited_s
        if waited_s - before_s > (now - before_at) / 2:
            self._starved_at[process] = now
        return self._starved_at.get(process, 0.0)


# One small request in each protocol that any server answers, with or without a key. Source for HTTP/2: RFC 9113, 3.4: a
# client begins with a fixed text and an empty SETTINGS frame, a server with a SETTINGS frame.
_REQUESTS = {
    "HTTP": b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
    "gRPC": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0",
}


class LivenessProbe(Closeable):
    """Measure the time since a server's last response, without blocking; any response counts.

    Args:
        address: HTTP address, or gRPC address without TLS.
    """

    def __init__(self, address: ListenAddress) -> None:
        self._address = address
        self._connection: socket.socket | None = None
        self._answered_at = time.monotonic()
        self._suspension = SuspensionDetector()

    def silent_s(self) -> float:
        """Seconds since the server's last response. Call regularly: one call sends a request, a later one reads."""
        if self._suspension.has_resumed():
            self._answered_at = time.monotonic()
        if self._connection is None:
            self._ask()
        else:
            self._read(self._connection)
        return time.monotonic() - self._answered_at

    def close(self) -> None:
        """Stop probing."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ask(self) -> None:
        try:
            self._connection = socket.create_connection(self._address.local_address, timeout=_CONNECT_S)
            self._connection.sendall(_REQUESTS[self._address.protocol])
            self._connection.setblocking(False)
        except OSError:
            self.close()

    def _read(self, connection: socket.socket) -> None:
        try:
            answered = bool(connection.recv(4096))
        except BlockingIOError:
            return
        except OSError:
            answered = False
        if answered:
            self._answered_at = time.monotonic()
        self.close()
