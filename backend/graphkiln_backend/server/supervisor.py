"""Runs tritonserver as a child: environment, readiness, signals, exit code, restarts, and nothing left behind.

Why a fault of one instance restarts the whole server: Triton (24.10) neither restarts a Python instance that died nor
reports it as not ready; it responds to every request with an error, for ever. Meanwhile the supervisor responds with
503. A server that ends by itself is started again, too: a request can abort Triton (24.10) while it is parsed. Only
what ends before it was ever live is an error of the setup, and is not tried again, unless a signal killed it.
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.limits import MemoryLimit
from graphkiln_backend.server.ports import publish_address
from graphkiln_backend.server.repository_control import HttpControl
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.signals import Interrupted, StopSignals
from graphkiln_backend.server.watchdog import SILENT_S, Cause, Fault, TimeLimits, Watchdog, describe_exit
from graphkiln_backend.system.processes import Guard, Reaper, kill_group
from graphkiln_backend.triton.restarts import write_restarts
from graphkiln_backend.triton.snapshot import SnapshotReader

# How often the supervisor looks at the processes: what looking at hundreds costs must not slow down their start.

POLL_S = 0.02
WATCH_S = 0.5  # how often the set of instances is read anew; the death of a known one is seen at once
_REST = 19.0  # looking takes a twentieth of a core at most: while models load, each core has enough to do
_LONGEST_REST_S = 1.0


class Waiting(Protocol):
    """What waits for processes: see `StopSignals.wait`."""

    def wait(self, processes: Sequence[int], timeout_s: float) -> None:
        """Sleeps until one of the processes ends, a signal comes, or the time is over."""


@dataclass(slots=True)
class Pace:
    """The time between two looks: of this thread's processor time, so that a busy machine delays nothing further."""

    _woke_at_s: float = field(default_factory=time.thread_time)

    def wait(self, signals: Waiting, processes: Sequence[int], *, live: bool) -> None:
        """Waits for the next look.

        Args:
            signals: Waits.
            processes: Whose end is seen at once.
            live: Whether the server takes requests; until then it is looked at often.
        """
        looked_s = time.thread_time() - self._woke_at_s
        signals.wait(processes, max(WATCH_S if live else POLL_S, min(_REST * looked_s, _LONGEST_REST_S)))
        self._woke_at_s = time.thread_time()


# How often a server is started again, how soon, and why: a budget that good service pays back.

MAX_RESTARTS = 5  # more faults in a row than that are not mended by another restart
SERVED_S = 5.0  # so much service pays for one fault
_FIRST_DELAY_S = 0.25


class RestartBudget:
    """Decides whether, and when, to start again. The first restart is immediate, each further one waits longer.

    Every fault costs one restart, every `SERVED_S` seconds of service give one back: a server that is hit now and then
    is restarted for ever, one that dies as soon as it serves is given up.
    """

    def __init__(self) -> None:
        self._counts: Counter[Cause] = Counter()
        self._spent = 0.0

    def spend(self, fault: Fault, served_s: float) -> float | None:
        """Counts a fault.

        Args:
            fault: What happened.
            served_s: How long the server had served before.

        Returns:
            The seconds to wait before the restart, or None when it is time to give up.
        """
        self._spent = max(0.0, self._spent - served_s / SERVED_S) + 1
        if self._spent > MAX_RESTARTS:
            return None
        self.count(fault.cause)
        return 0.0 if self._spent < 2 else _FIRST_DELAY_S * 2 ** int(self._spent - 1)

    @property
    def limit(self) -> int:
        """How many faults in a row are answered with a restart."""
        return MAX_RESTARTS

    def count(self, cause: Cause) -> None:
        """Counts a process that was ended without restarting the server, too."""
        self._counts[cause] += 1

    def write(self, instances: Path) -> None:
        """Tells the instances of a new run how often the server was restarted before, by cause.

        Every cause is among them, also with 0: Prometheus sees no increase in a counter that begins with a first fault.
        """
        write_restarts(instances, {cause.value: self._counts[cause] for cause in Cause})


if TYPE_CHECKING:
    import psutil

    from graphkiln_backend.server.load_progress import LoadProgress
    from graphkiln_backend.server.probe import ModelState
    from graphkiln_backend.server.version_control import VersionController
    from graphkiln_backend.server.watchdog import GrpcLivenessProbe, LivenessProbe
else:
    psutil = LazyModule("psutil")

_log = logging.getLogger("graphkiln.server")

_RETRY_S = 2.0  # how often a start is tried again for which there was no room


class Supervisor:
    """Runs tritonserver until it is told to stop, and restarts it after a fault.

    Args:
        launch: What to start.
        on_live: Called with the state of every model, each time that a server has started.
        on_loading: Called with how far the models are, again and again until then.
        limits: How long things may take.

    Attributes:
        last_words: Why `run` returned a code other than 0, once it has.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        on_live: Callable[[list[ModelState]], None],
        on_loading: Callable[[list[LoadProgress]], None] = lambda _: None,
        limits: TimeLimits | None = None,
    ) -> None:
        self._launch = launch
        self._on_live = on_live
        self._on_loading = on_loading
        self._limits = limits or TimeLimits()
        self._http = launch.flags.listen_address("http")
        self._unavailable = ExitStack()
        self._budget = RestartBudget()
        self._reaper = Reaper()
        self._live_at: float | None = None
        self._was_live = False
        self._refusing = False
        self._versions: VersionController | None = None
        self.last_words = ""

    def run(self) -> int:
        """Serves until the server ends.

        Returns:
            0 when it was told to stop; otherwise the server's exit code, 128 + N when signal N killed it; 1 when its
            instances failed again and again.

        Raises:
            ServerSetupError: The server cannot be started as requested.
        """
        with StopSignals() as signals, self._unavailable:
            while True:
                ended = self._serve_when_possible(signals)
                code = ended if isinstance(ended, int) else self._give_up_or_wait(ended, signals)
                if code is not None:
                    return code

    def _serve_when_possible(self, signals: StopSignals) -> int | Fault:
        """One run of the server. One that was live before is started again as soon as there is room for it.

        Raises:
            ServerSetupError: The first start fails.
        """
        said = ""
        while True:
            try:
                return self._serve_whole_or_in_part(signals)
            except (ServerSetupError, OSError) as error:  # a disk that is full by now
                if not self._was_live:
                    raise _to_setup_error(error) from error
                if str(error) != said:
                    _log.error("the server cannot be started again yet, trying every %g s: %s", _RETRY_S, error)
                said = str(error)
            if not self._wait(_RETRY_S, signals):
                return 0

    def _serve_whole_or_in_part(self, signals: StopSignals) -> int | Fault:
        """One run of the server, before which there may be one that ended because not every model could be loaded."""
        while (ended := self._serve(signals)) is None:
            _log.warning("not every model can be loaded: starting again, to serve the others")
        return ended

    def _serve(self, signals: StopSignals) -> int | Fault | None:
        """One run of the server: what to exit with, why to start again, or None for `Readiness.give_in`."""
        self._live_at, self._versions = None, None
        with RunFolder() as folder:
            command = self._prepare(folder, signals)
            if command is None:
                return 0
            self._budget.write(folder.instances)
            publish_address(folder.path, self._launch.flags)
            with self._launch.start(folder, command) as server, Guard(server):
                try:
                    return self._supervise(server, folder, signals)
                finally:
                    kill_group(server)
                    if self._versions:
                        self._versions.end()

    def _prepare(self, folder: RunFolder, signals: StopSignals) -> list[str] | None:
        """The server's command line; None when a signal came before there was one."""
        try:
            with signals.interrupting():
                return self._launch.prepare(folder)
        except Interrupted:
            _log.info("stopped before the server was started")
            return None

    def _supervise(
        self, server: subprocess.Popen[bytes], folder: RunFolder, signals: StopSignals
    ) -> int | Fault | None:
        from graphkiln_backend.server.drain import Drain
        from graphkiln_backend.server.load_progress import load_progress

        watchdog = Watchdog(folder.instances, server.pid, self._limits, self._launch.readiness.endless)
        instances = SnapshotReader(folder.instances)
        pace = Pace()
        with ExitStack() as probes:
            probe: LivenessProbe | GrpcLivenessProbe | None = None
            memory = MemoryLimit(server.pid, self._launch.memory_limit())
            while (code := server.poll()) is None:
                if signals.count:
                    if self._versions:
                        self._versions.halt()
                    with Drain(server, folder, self._launch.flags, signals, self._limits.drain) as drain:
                        return drain.run(live=self._live_at is not None)
                seen = instances.read()
                if fault := watchdog.look(seen) or _silence(probe):
                    self._refuse_requests()
                    return fault
                self._count_endless(watchdog.end_endless_loading(seen), folder)
                if self._live_at:
                    self._launch.readiness.endless.clear()  # another load may be of other files
                self._reaper.reap()
                if self._live_at is None and self._is_listening(server):
                    self._announce(folder)
                    probe = _enter(probes, self._launch.flags)
                if self._live_at is None:
                    with suppress(OSError):  # nobody reads standard error any more: no reason to end a service
                        self._on_loading(load_progress(seen))
                memory.follow(live=self._live_at is not None)
                pace.wait(signals, [server.pid, *seen.ready], live=bool(self._live_at))
            return self._judge(code)

    def _count_endless(self, number: int, folder: RunFolder) -> None:
        """Counts loads that were ended, and tells the instances, which publish it."""
        if not number:
            return
        for _ in range(number):
            self._budget.count(Cause.LOAD_DEADLINE)
        try:
            self._budget.write(folder.instances)
        except OSError as error:  # a full disk: no reason to end a service
            _log.warning("the metric of restarts is not up to date: %s", error)

    def _announce(self, folder: RunFolder) -> None:
        self._live_at = time.monotonic()
        self._was_live = True
        self._unavailable.close()
        self._refusing = False
        self._versions = self._launch.version_controller(folder)
        if self._versions:
            self._versions.begin(lambda: self._report(folder))
        else:
            self._report(folder)

    def _report(self, folder: RunFolder) -> None:
        from graphkiln_backend.server.probe import with_refusals

        states = with_refusals(self._list_models(folder), self._launch.managed.refusals())
        try:
            self._on_live(states)
        except OSError as error:  # nobody reads standard output any more: no reason to end a service
            _log.warning("the table of models cannot be printed: %s", error)

    def _judge(self, code: int) -> int | Fault | None:
        """What the end of a server that ended by itself means; None where it does not serve a part of its models."""
        if code > 0 and self._live_at is None and self._launch.readiness.give_in():
            return None
        fault = describe_exit(code)
        if code >= 0 and not self._was_live:
            self.last_words = fault.what if code else ""
            return code
        self._refuse_requests()
        return fault

    def _refuse_requests(self) -> None:
        """Responds with 503 from now until the next server is live."""
        from graphkiln_backend.server.unavailable import UnavailableListener

        if self._http and not self._refusing:
            try:
                self._unavailable.enter_context(UnavailableListener(self._http))
                self._refusing = True
            except OSError as error:  # the user's own --reuse-http-port=false
                _log.warning("until then the HTTP port refuses connections instead of responding with 503: %s", error)

    def _give_up_or_wait(self, fault: Fault, signals: StopSignals) -> int | None:
        served_s = time.monotonic() - self._live_at if self._live_at else 0.0
        delay_s = self._budget.spend(fault, served_s)
        if delay_s is None:
            self.last_words = f"{fault.what}, {self._budget.limit} restarts did not help: giving up"
            _log.error("%s", self.last_words)
            return fault.code
        _log.warning("%s: restarting the server%s", fault.what, f" in {delay_s:g} s" if delay_s else "")
        return None if self._wait(delay_s, signals) else 0

    def _wait(self, delay_s: float, signals: StopSignals) -> bool:
        """Waits before a start; says whether no signal came meanwhile."""
        deadline = time.monotonic() + delay_s
        while not signals.count and (left_s := deadline - time.monotonic()) > 0:
            signals.wait([], left_s)
        if signals.count:
            _log.info("stopped before the server was started again")
        return not signals.count

    def _is_listening(self, server: subprocess.Popen[bytes]) -> bool:
        """Whether the server is up: Triton opens its ports only when loading is over.

        Its sockets are looked at, because a request to the HTTP port could reach the supervisor, which shares it.
        """
        addresses = [self._http] if self._http else self._launch.flags.listen_addresses()
        ports = {address.port for address in addresses}
        try:
            connections = psutil.Process(server.pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(found.status == psutil.CONN_LISTEN and found.laddr.port in ports for found in connections)

    def _list_models(self, folder: RunFolder) -> list[ModelState]:
        from graphkiln_backend.server.load_progress import ExplainingControl
        from graphkiln_backend.server.probe import model_states, states_of_instances

        if not self._http:
            return states_of_instances(folder.instances)
        try:
            control = HttpControl(self._http, self._launch.access.http_headers)
            return model_states(ExplainingControl(control, folder.instances), folder.instances)
        except OSError as error:  # the user's own --http-restricted-api, or a server that ends at once
            _log.warning("the server does not list its models: %s", error)
            return states_of_instances(folder.instances)


def _to_setup_error(error: ServerSetupError | OSError) -> ServerSetupError:
    if isinstance(error, ServerSetupError):
        return error
    return ServerSetupError(f"cannot start the server: {error}", hint="graphkiln doctor examines this machine")


def _enter(probes: ExitStack, flags: TritonFlags) -> LivenessProbe | GrpcLivenessProbe | None:
    """What asks a server that has just become live; None where nothing can, over gRPC with the user's own TLS."""
    from graphkiln_backend.server.watchdog import GrpcLivenessProbe, LivenessProbe

    http, grpc = flags.listen_address("http"), flags.listen_address("grpc")
    if http:
        return probes.enter_context(LivenessProbe(http))
    return probes.enter_context(GrpcLivenessProbe(grpc)) if grpc and "grpc-use-ssl" not in flags.values else None


def _silence(probe: LivenessProbe | GrpcLivenessProbe | None) -> Fault | None:
    if probe and probe.silent_s() > SILENT_S:
        return Fault(cause=Cause.SERVER_HUNG, what=f"tritonserver has not responded for {SILENT_S:g} s")
    return None
