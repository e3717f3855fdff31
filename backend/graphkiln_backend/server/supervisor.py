"""Runs tritonserver as a child: environment, readiness, signals, draining, exit code, and nothing left behind.

Why the supervisor ends a drained server itself: on SIGTERM, Triton (24.10) first waits for every HTTP connection to be
closed by its client. An idle keep-alive connection never is, so the bare server waits for all of its
`--exit-timeout-secs` (30 s) and then exits with code 1, although nothing was left to do. Each instance counts the
batches that it has begun and ended; when all have been idle for `_SETTLE_S` after SIGTERM, no request is in flight
and the server is ended. Models of other backends keep no such count: where one is loaded, Triton's own wait decides.

Why a dead instance restarts the whole server: Triton (24.10) neither restarts a Python instance that died nor reports
it as not ready; it responds to every request with an error, for ever. Meanwhile the supervisor responds with 503.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack

import psutil

from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.probe import ModelState, model_states, states_of_instances, with_refusals
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.signals import Interrupted, StopSignals
from graphkiln_backend.server.unavailable import UnavailableListener
from graphkiln_backend.triton.instance_status import read_counters, read_statuses

_log = logging.getLogger("graphkiln.server")

_POLL_S = 0.02
_WATCH_S = 1.0
"""How often the set of instances is read anew; the death of a known one is seen at once."""
_SETTLE_S = 2.0
"""Longer than the time between a request's last byte and its batch; short enough to end within 5 s."""
_MAX_RESTARTS, _RESTARTS_WITHIN_S = 5, 120.0
"""More deaths than that are a fault that a restart does not mend."""


class Supervisor:
    """Runs tritonserver until it is told to stop, and restarts it when an instance dies.

    Args:
        launch: What to start.
        on_live: Called with the state of every model, each time that a server has started.
    """

    def __init__(self, launch: Launch, *, on_live: Callable[[list[ModelState]], None]) -> None:
        self._launch = launch
        self._on_live = on_live
        self._http = launch.flags.listen_address("http")
        self._unavailable = ExitStack()
        self._deaths: deque[float] = deque(maxlen=_MAX_RESTARTS)

    def run(self) -> int:
        """Serves until the server ends.

        Returns:
            The server's exit code; 0 when it was ended after a complete drain; 128 + N when signal N killed it; 1 when
            instances died again and again.

        Raises:
            ServerSetupError: The server cannot be started as requested.
        """
        with StopSignals() as signals, self._unavailable:
            while True:
                with RunFolder() as folder:
                    command = self._prepare(folder, signals)
                    if command is None:
                        return 0
                    with self._launch.start(folder, command) as server:
                        try:
                            code = self._supervise(server, folder, signals)
                        finally:
                            _kill_group(server)
                            self._launch.rollout.end()
                if code is not None:
                    return code

    def _prepare(self, folder: RunFolder, signals: StopSignals) -> list[str] | None:
        """The server's command line; None when a signal came before there was one."""
        try:
            with signals.interrupting():
                return self._launch.prepare(folder)
        except Interrupted:
            _log.info("stopped before the server was started")
            return None

    def _supervise(self, server: subprocess.Popen[bytes], folder: RunFolder, signals: StopSignals) -> int | None:
        """Returns the exit code, or None when the server must be started again."""
        live = False
        while (code := server.poll()) is None:
            if signals.count:
                return self._stop(server, folder, signals, live=live)
            if dead := _dead_instance(folder):
                return self._give_up_or_restart(dead)
            if not live and self._is_listening(server):
                live = True
                self._unavailable.close()
                self._launch.look_after(folder, lambda: self._report(folder))
            instances = [status.pid for status in read_statuses(folder.instances)]
            signals.wait([server.pid, *instances], _WATCH_S if live else _POLL_S)
        return _exit_code(code)

    def _give_up_or_restart(self, dead: str) -> int | None:
        now = time.monotonic()
        if len(self._deaths) == _MAX_RESTARTS and now - self._deaths[0] < _RESTARTS_WITHIN_S:
            _log.error("%s died, %d deaths within %.0f s: giving up", dead, _MAX_RESTARTS + 1, _RESTARTS_WITHIN_S)
            return 1
        self._deaths.append(now)
        _log.warning("%s died: restarting the server", dead)
        if self._http:
            try:
                self._unavailable.enter_context(UnavailableListener(self._http))
            except OSError as error:  # the user's own --reuse-http-port=false
                _log.warning("until then the HTTP port refuses connections instead of responding with 503: %s", error)
        return None

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

    def _report(self, folder: RunFolder) -> None:
        self._on_live(with_refusals(self._list_models(folder), self._launch.managed.refusals()))

    def _list_models(self, folder: RunFolder) -> list[ModelState]:
        if not self._http:
            return []
        try:
            return model_states(self._http, folder.instances, self._launch.access.http_headers)
        except OSError as error:  # the user's own --http-restricted-api, or a server that ends at once
            _log.warning("the server does not list its models: %s", error)
            return states_of_instances(folder.instances)

    def _stop(self, server: subprocess.Popen[bytes], folder: RunFolder, signals: StopSignals, *, live: bool) -> int:
        _log.info("stopping: finishing the requests in flight")
        self._launch.rollout.halt()
        counted = not live or self._every_model_is_counted(folder)
        server.send_signal(signal.SIGTERM)
        counters = read_counters(folder.instances)
        idle_since = time.monotonic()
        while (code := server.poll()) is None:
            if signals.count > 1:
                _log.warning("stopping at once: second signal")
                _kill_group(server)
                return 128 + signal.SIGKILL
            signals.wait([server.pid], _POLL_S)
            before, counters = counters, read_counters(folder.instances)
            if counters != before or any(begun != ended for begun, ended in counters.values()):
                idle_since = time.monotonic()
            if counted and time.monotonic() - idle_since > _SETTLE_S:
                _log.info("stopped: nothing was in flight")
                return 0
        if code:
            _log.info("tritonserver ended with code %d", _exit_code(code))
        else:
            _log.info("stopped")
        return _exit_code(code)

    def _every_model_is_counted(self, folder: RunFolder) -> bool:
        """Whether every loaded model counts its batches. Without HTTP there is no connection to wait for."""
        try:
            states = model_states(self._http, folder.instances, self._launch.access.http_headers) if self._http else []
        except OSError:
            return False
        return all(state.status for state in states if state.state == "READY")


def _dead_instance(folder: RunFolder) -> str:
    """The name of an instance that published its status and is gone without having removed it, or empty."""
    for status in read_statuses(folder.instances):
        try:
            gone = psutil.Process(status.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            gone = True
        if gone and status in read_statuses(folder.instances):
            return f"an instance of {status.model} version {status.version}"
    return ""


def _exit_code(code: int) -> int:
    """The exit code of a shell: 128 + N for a process that signal N killed."""
    return code if code >= 0 else 128 - code


def _kill_group(server: subprocess.Popen[bytes]) -> None:
    """Kills the server and its stubs, whatever state they are in."""
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    server.wait()
