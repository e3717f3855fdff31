"""Supervise a server for `graphkiln serve`: start it, watch it, restart it after a fault, drain it at the end.

1. Prepare a run folder and start tritonserver in it (`server.launch`). Models load before its ports open; if some
   cannot be loaded, it is restarted to serve the others.
2. Live: decide which versions serve (`server.version_control`), print the table of models, and keep controlling them.
3. Watch (`server.watchdog`): dead or hung instances, endless computing or loading, an unresponsive server. After a
   fault the whole server is restarted, because Triton (24.10) neither restarts a dead Python instance nor reports it
   as not ready; it fails every request from then on. Meanwhile the edge, if any, answers 503 (`server.edge`).
4. Restart a server that exits by itself, too: a request can abort Triton (24.10) while it is parsed. An exit before the
   first server was live is an error of the set-up and is not retried, unless a signal killed the server.
5. On SIGTERM or SIGINT, drain it (`server.drain`); no process, folder or shared memory of a run remains.

From first to last, this process also serves the metrics port (`server.metrics_port`).

    process                  started by                            ends
    HAProxy, the edge        `cli.serve` (`server.edge`), first    after tritonserver
    page                     `cli.serve` (`graphkiln.page`)        with the supervisor
    tritonserver and stubs   `Launch.start`, after each fault      at a fault or a stop, as one process group
    guard (a shell)          `_serve`, for each tritonserver       kills that group if the supervisor is killed
"""

from __future__ import annotations

import logging
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.limits import MemoryLimit
from graphkiln_backend.server.metrics_port import MetricsPort
from graphkiln_backend.server.model_states import LoadProgress, ModelState, list_models, load_progress
from graphkiln_backend.server.ports import publish_address
from graphkiln_backend.server.proofs import ProofState
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.watchdog import Cause, Fault, TimeLimits, Watchdog, describe_exit
from graphkiln_backend.system.processes import Guard, Reaper, kill_group
from graphkiln_backend.system.signals import Interrupted, StopSignals
from graphkiln_backend.triton.metrics import read_metrics
from graphkiln_backend.triton.snapshot import Snapshot, SnapshotReader

if TYPE_CHECKING:
    from pathlib import Path

    import psutil

    from graphkiln_backend.server.edge import Edge
    from graphkiln_backend.server.flags import ListenAddress
    from graphkiln_backend.server.golden_requests import Asking
    from graphkiln_backend.server.rollout_loop import RolloutController
    from graphkiln_backend.server.version_control import VersionController
    from graphkiln_backend.triton.instance_status import InstanceStatus
else:
    psutil = LazyModule("psutil")

_log = logging.getLogger("graphkiln.server")

_RETRY_S = 2.0  # between attempts to start a server while resources are missing
POLL_S = 0.02  # between checks of the processes until the server is live
WATCH_S = 0.5  # between checks afterwards; the death of a known instance is noticed at once
# Pause per processor time of a check: checks take at most 5% of a core, so that hundreds of processes start quickly.
_REST = 19.0
_LONGEST_REST_S = 1.0
MAX_RESTARTS = 5  # budget of restarts, which service refills
SERVED_S = 5.0  # seconds of service that earn one restart
_FIRST_DELAY_S = 0.5  # before the second restart; the first one is immediate


class ServePart:
    """Outcome of a server that exited before it was live: start again at once, to serve a part of the models."""


class Supervisor:
    """Run tritonserver until a signal asks to stop, and restart it after a fault.

    Args:
        launch: Starts servers.
        on_live: Called with the state of every model, once per live server; if a version failed at the start, after its
            replacement, from another thread.
        on_loading: Called with the progress of loading, repeatedly until the server is live.
        limits: Time limits.
        edge: HAProxy in front of the server, or None.
        metrics: Address of the metrics port, which this process serves; None for none.

    Attributes:
        last_words: The reason for a nonzero exit code of `run`; empty otherwise.
    """

    def __init__(
        self,
        launch: Launch,
        *,
        on_live: Callable[[list[ModelState]], None],
        on_loading: Callable[[list[LoadProgress]], None] = lambda _: None,
        limits: TimeLimits | None = None,
        edge: Edge | None = None,
        metrics: ListenAddress | None = None,
    ) -> None:
        self._launch = launch
        self._on_live = on_live
        self._on_loading = on_loading
        self._limits = limits or TimeLimits()
        self._edge = edge
        self._metrics = metrics
        self._budget = RestartBudget()
        self._reaper = Reaper()
        self._versions: VersionController | None = None
        self._rollouts: RolloutController | None = None
        self._first_replay: Asking | None = None
        self._live_at: float | None = None  # when the current server became live
        self._statuses: tuple[InstanceStatus, ...] = ()  # of ready instances
        self._instances: Path | None = None  # folder of their files, while a server runs
        self._was_live = False  # whether any server was live
        self.last_words = ""

    def run(self) -> int:
        """Serve until the end.

        Returns:
            After a signal to stop: 0, 128 + SIGKILL if a second signal killed the server, or the server's exit code if
            it failed. Otherwise the server's exit code (128 + N if signal N killed it), or 1 if its instances failed
            repeatedly.

        Raises:
            ServerSetupError: The server cannot be started as requested. Once a server was live, starts are retried.
        """
        reported = ""
        delay_s: float | None
        with StopSignals() as signals, self._open_metrics_port():
            while True:
                try:
                    outcome = self._serve(signals)
                except (ServerSetupError, OSError) as error:  # for example a full disk
                    if not self._was_live:
                        raise _to_setup_error(error) from error
                    if str(error) != reported:
                        _log.error("the server cannot be started again yet, trying every %g s: %s", _RETRY_S, error)
                    reported, delay_s = str(error), _RETRY_S
                else:
                    if isinstance(outcome, int):
                        return outcome
                    reported = ""
                    if isinstance(outcome, ServePart):
                        delay_s = 0.0
                    elif (delay_s := self._restart_delay_s(outcome)) is None:
                        return outcome.code
                if not self._wait(delay_s, signals):
                    return 0

    def _open_metrics_port(self) -> AbstractContextManager[object]:
        triton = self._launch.flags.listen_address("metrics")
        if self._metrics is None or triton is None:
            return nullcontext()
        return MetricsPort(
            self._metrics,
            triton,
            version=self._launch.installation.version,
            restarts=self._budget.counts,
            rows=self._proofs,
            instances=lambda: read_metrics(self._instances) if self._instances else (),
            refusals=self._launch.managed.public_refusals,
            rollouts=lambda: self._launch.managed.rollouts.folders,
        )

    def _proofs(self) -> list[ProofState]:
        """Proofs through the server, and of versions with ready instances of graphkiln, which prove themselves."""
        own = {
            ProofState(
                model=status.model,
                version=status.version,
                backend=status.backend,
                seat="python",
                proven=bool(status.self_test),
            )
            for status in self._statuses
        }
        return [*self._launch.proofs.rows(), *own]

    def _serve(self, signals: StopSignals) -> int | Fault | ServePart:
        """Run one server from its start to its end.

        Returns:
            Exit code of the supervisor; a fault that needs a restart; `ServePart`.

        Raises:
            ServerSetupError, OSError: It cannot be started.
        """
        self._live_at, self._versions, self._rollouts, self._statuses = None, None, None, ()
        self._instances = None
        with RunFolder() as folder:
            try:
                with signals.interrupting():  # converting a graph takes seconds
                    command = self._launch.prepare(folder)
            except Interrupted:
                _log.info("stopped before the server was started")
                return 0
            publish_address(folder.path, self._launch.flags)
            with self._launch.start(folder, command) as server, ExitStack() as guard:
                try:
                    guard.enter_context(Guard(server))
                    self._first_replay = guard.enter_context(self._launch.first_replay(folder))
                    return self._supervise(server, folder, signals)
                except OSError as error:  # for example too many open files
                    if self._live_at is None:
                        raise
                    return Fault(cause=Cause.SERVER_DIED, what=f"tritonserver cannot be watched: {error}")
                finally:
                    if self._edge:
                        self._edge.refuse()  # has no effect after a drain
                    kill_group(server)
                    if self._rollouts:
                        self._rollouts.halt()
                    if self._versions:
                        self._versions.end()
                    if self._rollouts:
                        self._rollouts.close()

    def _supervise(
        self, server: subprocess.Popen[bytes], folder: RunFolder, signals: StopSignals
    ) -> int | Fault | ServePart:
        """Watch a running server until it exits, has a fault, or a stop signal arrives."""
        instances = SnapshotReader(folder.instances)
        self._instances = folder.instances
        memory = MemoryLimit(server.pid, self._launch.memory_limit())
        pace = Pace()
        endless = self._launch.readiness.endless
        features = self._launch.installation.features
        with Watchdog(folder.instances, server.pid, self._limits, endless, features) as watchdog:
            while (code := server.poll()) is None:
                if signals.count:
                    return self._drain(server, folder, signals)
                seen = instances.read()
                self._statuses = tuple(seen.statuses.values())
                if fault := self._find_fault(watchdog, seen):
                    if fault.instance:
                        self._launch.deadly.learn(folder.instances, fault.instance)
                    return fault
                if aborted := watchdog.end_endless_loading(seen):
                    self._budget.count(Cause.LOAD_DEADLINE, aborted)
                if self._live_at:
                    endless.clear()  # later loads may be of other files, see `Readiness`
                elif self._is_listening(server):
                    self._announce(folder)
                    watchdog.probe(self._launch.flags)
                else:
                    with suppress(OSError):  # standard error is closed
                        self._on_loading(load_progress(seen))
                self._reaper.reap()
                memory.follow(live=self._live_at is not None)
                pace.wait(signals, [server.pid, *seen.ready], live=bool(self._live_at))
        if code > 0 and self._live_at is None and self._launch.readiness.fall_back():
            _log.warning(
                "not every model can be loaded: starting again, to serve the others; /v2/health/ready is 400 until the "
                "failed ones are mended and loaded"
            )
            return ServePart()
        fault = describe_exit(code)
        if code >= 0 and not self._was_live:
            self.last_words = fault.what if code else ""
            return code
        return fault

    def _find_fault(self, watchdog: Watchdog, seen: Snapshot) -> Fault | None:
        """Find a fault that needs a restart; a candidate that failed ends its rollout instead."""
        if fault := watchdog.look(seen):
            return fault
        if self._rollouts:
            for key, failed in watchdog.find_failed_candidates(seen).items():
                self._rollouts.report_fault(seen.statuses[key].model, failed.what, key)
        if self._versions and self._versions.fault:
            return Fault(cause=Cause.WRONG_OUTPUTS, what=self._versions.fault)
        return None

    def _is_listening(self, server: subprocess.Popen[bytes]) -> bool:
        """True if the server is up: Triton opens its ports after loading."""
        flags = self._launch.flags
        http = flags.listen_address("http")
        addresses = [http] if http else flags.listen_addresses()
        ports = {address.port for address in addresses}
        try:
            connections = psutil.Process(server.pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(found.status == psutil.CONN_LISTEN and found.laddr.port in ports for found in connections)

    def _announce(self, folder: RunFolder) -> None:
        """Admit requests to a live server; report its models once failed and wrong versions are replaced."""
        self._live_at = time.monotonic()
        self._was_live = True
        self._versions = self._launch.version_controller(folder, self._first_replay)
        if self._versions:
            self._versions.begin(lambda: self._report(folder))
            self._rollouts = self._launch.rollout_controller(folder, self._versions)
            if self._rollouts:
                self._rollouts.begin()
        else:
            self._report(folder)
        if self._edge and not self._launch.managed.provable:  # otherwise once their golden samples are right
            self._edge.admit()

    def _report(self, folder: RunFolder) -> None:
        if self._edge:
            self._edge.admit()
        launch = self._launch
        states = list_models(launch.control(), folder.instances, launch.managed.refusals(), launch.proofs.rows())
        try:
            self._on_live(states)
        except OSError as error:  # standard output is closed
            _log.warning("the table of models cannot be printed: %s", error)

    def _drain(self, server: subprocess.Popen[bytes], folder: RunFolder, signals: StopSignals) -> int:
        from graphkiln_backend.server.drain import Drain

        if self._rollouts:
            self._rollouts.halt()
        if self._versions:
            self._versions.halt()
        traces, records = "trace-config" in self._launch.flags.values, self._launch.record is not None
        drain = Drain(server, folder, signals, self._limits.drain, self._edge, writes_traces=traces, records=records)
        code = drain.run(live=self._live_at is not None)
        if code:
            killed = "tritonserver was killed at the second signal"
            self.last_words = killed if signals.count > 1 else f"tritonserver ended with code {code}"
        return code

    def _restart_delay_s(self, fault: Fault) -> float | None:
        """Seconds to wait before a restart; None to give up."""
        served_s = time.monotonic() - self._live_at - fault.lasted_s if self._live_at else 0.0
        delay_s = self._budget.spend(fault, max(0.0, served_s))
        if delay_s is None:
            self.last_words = f"{fault.what}, {MAX_RESTARTS} restarts did not help: giving up"
            _log.error("%s", self.last_words)
        else:
            _log.warning("%s: restarting the server%s", fault.what, f" in {delay_s:g} s" if delay_s else "")
        return delay_s

    def _wait(self, delay_s: float, signals: StopSignals) -> bool:
        """Wait before a start; return False if a signal arrived."""
        deadline = time.monotonic() + delay_s
        while not signals.count and (left_s := deadline - time.monotonic()) > 0:
            signals.wait([], left_s)
        if signals.count:
            _log.info("stopped before the server was started again")
        return not signals.count


def _to_setup_error(error: ServerSetupError | OSError) -> ServerSetupError:
    if isinstance(error, ServerSetupError):
        return error
    return ServerSetupError(f"cannot start the server: {error}", hint="graphkiln doctor examines this machine")


class RestartBudget:
    """Limit restarts. The first restart is immediate, each further one waits longer.

    Each fault costs one restart, each `SERVED_S` seconds of service give one back: rare faults are restarted without
    limit, a server that keeps dying as soon as it serves is given up.
    """

    def __init__(self) -> None:
        self._counts: Counter[Cause] = Counter()
        self._spent = 0.0

    def spend(self, fault: Fault, served_s: float) -> float | None:
        """Count a fault.

        Returns:
            Seconds to wait before the restart, or None to give up.
        """
        self._spent = max(0.0, self._spent - served_s / SERVED_S) + 1
        if self._spent > MAX_RESTARTS:
            return None
        self.count(fault.cause)
        return 0.0 if self._spent < 2 else _FIRST_DELAY_S * 2 ** int(self._spent - 2)

    def count(self, cause: Cause, number: int = 1) -> None:
        """Count a cause without spending a restart."""
        self._counts[cause] += number

    def counts(self) -> dict[str, int]:
        """Restarts by cause.

        Causes with 0 are included: Prometheus sees no increase of a counter that appears with its first fault.
        """
        return {cause.value: self._counts[cause] for cause in Cause}


class Pace:
    """Pause between checks, in proportion to their processor time, which a busy machine does not lengthen."""

    def __init__(self) -> None:
        self._woke_at_s = time.thread_time()

    def wait(self, signals: StopSignals, processes: list[int], *, live: bool) -> None:
        """Wait for the next check, a signal, or the end of one of the processes."""
        check_s = time.thread_time() - self._woke_at_s
        signals.wait(processes, max(WATCH_S if live else POLL_S, min(_REST * check_s, _LONGEST_REST_S)))
        self._woke_at_s = time.thread_time()
