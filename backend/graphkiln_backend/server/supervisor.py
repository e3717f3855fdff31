"""Runs tritonserver as a child: environment, readiness, signals, draining, exit code, and no trace left behind.

Why the supervisor ends a drained server itself: on SIGTERM, Triton (24.10) first waits for every HTTP connection to be
closed by its client. An idle keep-alive connection never is, so the bare server waits for all of its
`--exit-timeout-secs` (30 s) and then exits with code 1, although nothing was left to do. Each of our instances counts
the batches that it has begun and ended; when all have been idle for `_SETTLE_S` after SIGTERM, no request is in flight
and the server is ended. Models of other backends keep no such count: where one is loaded, Triton's own wait decides.

Why a dead instance restarts the whole server: Triton (24.10) neither restarts a Python instance that died nor reports
it as not ready; it answers every request with an error, for ever. A stand-in answers 503 meanwhile.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import psutil

from graphkiln_backend.server.launch import Launch
from graphkiln_backend.server.probe import ModelState, model_states
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.unavailable import UnavailableListener
from graphkiln_backend.triton.instance_status import read_counters, read_statuses

_log = logging.getLogger("graphkiln.server")

_POLL_S = 0.02
_WATCH_S = 1.0
"""How often the set of instances is read anew; the death of a known one is seen at once."""
_SETTLE_S = 2.0
"""Longer than the time between a request's last byte and its batch; short enough to end within 5 s."""
_RESTARTS, _RESTARTS_WITHIN_S = 5, 120.0
"""More deaths than that are a fault that a restart does not mend."""


class _StoppedEarly(Exception):
    """A signal came while nothing was served yet."""


class Supervisor:
    """Runs tritonserver until it is told to stop, and restarts it when an instance of ours dies.

    Args:
        launch: What to start.
        on_live: Called with the state of every model, each time that a server has started.
    """

    def __init__(self, launch: Launch, *, on_live: Callable[[list[ModelState]], None]) -> None:
        self._launch = launch
        self._on_live = on_live
        self._http = launch.flags.endpoint("http")
        self._stop_signals = 0
        self._interruptible = False
        self._stand_in = ExitStack()
        self._deaths: deque[float] = deque(maxlen=_RESTARTS)

    def run(self) -> int:
        """Serves until the server ends.

        Returns:
            The server's exit code; 0 when it was ended after a complete drain; 128 + N when signal N killed it; 1 when
            instances died again and again.
        """
        with _signals_to(self._on_signal) as wake, self._stand_in:
            while True:
                with RunFolder() as folder:
                    command = self._prepared(folder)
                    if command is None:
                        return 0
                    with self._launch.start(folder, command) as server:
                        try:
                            code = self._supervise(server, folder, wake)
                        finally:
                            _kill_group(server)
                if code is not None:
                    return code

    def _prepared(self, folder: RunFolder) -> list[str] | None:
        """The server's command line; None when it was told to stop before there was one."""
        self._interruptible = True
        try:
            return self._launch.prepare(folder)
        except _StoppedEarly:
            _log.info("stopped before the server was started")
            return None
        finally:
            self._interruptible = False

    def _supervise(self, server: subprocess.Popen[bytes], folder: RunFolder, wake: socket.socket) -> int | None:
        """Returns the exit code, or None when the server must be started again."""
        live = False
        while (code := server.poll()) is None:
            if self._stop_signals:
                return self._stop(server, folder, wake, live=live)
            if dead := _dead_instance(folder):
                return self._give_up_or_restart(dead)
            if not live and self._listens(server):
                live = True
                self._stand_in.close()
                self._on_live(self._states(folder))
            instances = [status.pid for status in read_statuses(folder.instances)]
            _wait([server.pid, *instances], wake, _WATCH_S if live else _POLL_S)
        return _exit_code(code)

    def _give_up_or_restart(self, dead: str) -> int | None:
        now = time.monotonic()
        if len(self._deaths) == _RESTARTS and now - self._deaths[0] < _RESTARTS_WITHIN_S:
            _log.error("%s died, the %dth death within %.0f s: giving up", dead, _RESTARTS + 1, _RESTARTS_WITHIN_S)
            return 1
        self._deaths.append(now)
        _log.warning("%s died: restarting the server", dead)
        if self._http:
            try:
                self._stand_in.enter_context(UnavailableListener(self._http))
            except OSError as error:  # the user's own --reuse-http-port=false
                _log.warning("until then the HTTP port refuses connections instead of answering 503: %s", error)
        return None

    def _listens(self, server: subprocess.Popen[bytes]) -> bool:
        """Whether the server is up: Triton opens its ports only when loading is over.

        Its sockets are looked at, because asking the HTTP port could reach the stand-in, which shares it.
        """
        wanted = {self._http.port} if self._http else {endpoint.port for endpoint in self._launch.flags.endpoints()}
        try:
            sockets = psutil.Process(server.pid).net_connections("tcp")
        except psutil.NoSuchProcess:
            return False
        return any(found.status == psutil.CONN_LISTEN and found.laddr.port in wanted for found in sockets)

    def _states(self, folder: RunFolder) -> list[ModelState]:
        return model_states(self._http, folder.instances) if self._http else []

    def _stop(self, server: subprocess.Popen[bytes], folder: RunFolder, wake: socket.socket, *, live: bool) -> int:
        _log.info("stopping: finishing the requests in flight")
        countable = not live or self._all_models_ours(folder)
        server.send_signal(signal.SIGTERM)
        counters = read_counters(folder.instances)
        idle_since = time.monotonic()
        while (code := server.poll()) is None:
            if self._stop_signals > 1:
                _log.warning("stopping at once: second signal")
                _kill_group(server)
                return 128 + signal.SIGKILL
            _wait([server.pid], wake, _POLL_S)
            before, counters = counters, read_counters(folder.instances)
            if counters != before or any(begun != ended for begun, ended in counters.values()):
                idle_since = time.monotonic()
            if countable and time.monotonic() - idle_since > _SETTLE_S:
                _log.info("stopped: nothing was in flight")
                return 0
        _log.info(
            "stopped" if code == 0 else "tritonserver ended with code %d", *(() if code == 0 else (_exit_code(code),))
        )
        return _exit_code(code)

    def _all_models_ours(self, folder: RunFolder) -> bool:
        """Whether every loaded model counts its batches. Without HTTP there is no connection to wait for."""
        try:
            return all(state.status for state in self._states(folder) if state.state == "READY")
        except OSError:
            return False

    def _on_signal(self) -> None:
        self._stop_signals += 1
        if self._interruptible:
            self._interruptible = False
            raise _StoppedEarly


@contextmanager
def _signals_to(on_stop: Callable[[], None]) -> Iterator[socket.socket]:
    """Calls `on_stop` at each SIGTERM and SIGINT; yields a socket that becomes readable then."""
    wake, waker = socket.socketpair()
    with wake, waker:
        wake.setblocking(False)
        waker.setblocking(False)
        old_fd = signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        old = {number: signal.signal(number, lambda *_: on_stop()) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield wake
        finally:
            signal.set_wakeup_fd(old_fd)
            for number, handler in old.items():
                signal.signal(number, handler)


def _dead_instance(folder: RunFolder) -> str:
    """The name of an instance that published its status and is gone without having taken it back, or empty."""
    for status in read_statuses(folder.instances):
        try:
            gone = psutil.Process(status.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            gone = True
        if gone and status in read_statuses(folder.instances):
            return f"an instance of {status.model} version {status.version}"
    return ""


def _wait(processes: list[int], wake: socket.socket, timeout_s: float) -> None:
    """Sleeps until one of the processes ends, a signal comes, or the time is over."""
    with ExitStack() as stack:
        ended = []
        for process in processes:
            try:
                ended.append(os.pidfd_open(process))
            except ProcessLookupError:
                return
            stack.callback(os.close, ended[-1])
        ready, _, _ = select.select([*ended, wake.fileno()], [], [], timeout_s)
    if wake.fileno() in ready:
        wake.recv(4096)


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _kill_group(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and its stubs, whatever state they are in."""
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    server.wait()
