"""Drain a server: finish the requests in flight, then end it.

With an edge, new requests get 503 (UNAVAILABLE over gRPC) at once and those in flight continue. When all are answered,
the edge stops listening and closes each connection after its next response, so that none is reset. Meanwhile
tritonserver is ended.

Without an edge, on the loopback interface, new requests are served until no instance has computed for a moment; then
tritonserver is ended, and a request that it was just reading is lost.

After the time limit the server is ended in any case.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from graphkiln_backend.graph.modules import LazyModule
from graphkiln_backend.server.edge import Edge
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.watchdog import exit_code, is_stub_of_others, read_stubs
from graphkiln_backend.system.processes import kill_group
from graphkiln_backend.system.signals import StopSignals
from graphkiln_backend.triton.snapshot import SnapshotReader

if TYPE_CHECKING:
    import psutil
else:
    psutil = LazyModule("psutil")

_log = logging.getLogger("graphkiln.server")

_POLL_S = 0.02
_SETTLE_S = 0.5  # longer than the time between a request's last byte and its batch
# For tritonserver to exit by itself, which then writes its traces. It would wait 30 s for HTTP clients (24.10) and
# exit with code 1.
_EXIT_S = 1.0
# For models with something to complete: a file of `serve --record`, or `finalize` of somebody else's Python model.
# Triton calls `finalize` a second after the signal (24.10).
_FINALIZE_S = 10.0


class Drain:
    """Drain one run of the server."""

    def __init__(
        self,
        server: subprocess.Popen[bytes],
        folder: RunFolder,
        signals: StopSignals,
        limit_s: float,
        edge: Edge | None,
        *,
        writes_traces: bool = False,
        records: bool = False,
    ) -> None:
        self._server, self._signals, self._edge = server, signals, edge
        self._writes_traces = writes_traces
        self._records = records
        self._instances = SnapshotReader(folder.instances)
        self._limit_s = limit_s
        self._counted_at = time.monotonic()
        self._deadline = self._counted_at + limit_s
        self._counts = self._count_batches()

    def run(self, *, live: bool) -> int:
        """Drain and end the server.

        Returns:
            Exit code: 0 if the supervisor ended the server, 128 + SIGKILL after a second signal, or the server's own
            code if it exited by itself.
        """
        _log.info("stopping: finishing the requests in flight")
        if self._edge:
            self._edge.refuse()
        if live:
            is_quiet = self._wait(self._is_quiet, self._deadline)
            if self._signals.count > 1:
                return self._kill()
            if not is_quiet and time.monotonic() > self._deadline:
                computing = sum(begun != ended for begun, ended in self._count_batches().values())
                _log.warning(
                    "requests are still in flight after %g s (--drain), %d batches are being computed: ending them",
                    self._limit_s,
                    computing,
                )
        if self._edge:
            self._edge.leave()
        return self._end()

    def _wait(self, condition: Callable[[], bool], deadline: float) -> bool:
        """Wait for a condition (true), or the end of the server, a second signal or the deadline (false)."""
        while not condition():
            if self._signals.count > 1 or self._server.poll() is not None or time.monotonic() > deadline:
                return False
            self._signals.wait([self._server.pid], _POLL_S)
        return True

    def _is_quiet(self) -> bool:
        """True if nothing is in flight: by the edge's count, or else if no instance has computed for a moment."""
        is_idle = self._is_idle()
        try:
            in_flight = self._edge.in_flight() if self._edge else None
        except OSError:  # the edge is being restarted
            in_flight = None
        if in_flight is None:
            return is_idle
        streams = in_flight.pop("streams", 0)  # a stream may stay open without requests
        return not any(in_flight.values()) and (is_idle or not streams)

    def _is_idle(self) -> bool:
        """True if no instance has computed for a moment, or for half of the time limit if that is shorter."""
        counts, now = self._count_batches(), time.monotonic()
        if counts != self._counts:
            self._counts, self._counted_at = counts, now
        is_computing = any(begun != ended for begun, ended in counts.values())
        return not is_computing and now - self._counted_at > min(_SETTLE_S, self._limit_s / 2)

    def _count_batches(self) -> dict[str, tuple[int, int]]:
        """Numbers of begun and ended batches, by instance."""
        progress = self._instances.read().progress
        return {key: (value.begun, value.ended) for key, value in progress.items()}

    def _processes(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self._server.pid).children(recursive=True)
        return []

    def _exit_s(self) -> float:
        """Seconds for tritonserver and its models to end by themselves.

        None for models of graphkiln's backend alone: they have nothing to complete, and the second that Triton waits
        before it calls `finalize` would make each stop and restart longer.
        """
        if self._records or any(map(is_stub_of_others, self._processes())):
            return _FINALIZE_S
        return 0.0 if read_stubs(self._server.pid) and not self._writes_traces else _EXIT_S

    def _end(self) -> int:
        """End the server: by SIGTERM, then by SIGKILL."""
        if self._server.poll() is None:
            exit_s, waits_for_models = self._exit_s(), bool(self._processes()) and not self._writes_traces
            self._server.send_signal(signal.SIGTERM)
            self._wait(lambda: waits_for_models and not self._processes(), time.monotonic() + exit_s)
            if self._signals.count > 1 and self._server.poll() is None:
                return self._kill()
        code = self._server.poll() or 0
        kill_group(self._server)
        if code in (0, -signal.SIGTERM):  # killed by our signal before it had a handler
            _log.info("stopped")
            return 0
        _log.info("tritonserver ended with code %d", exit_code(code))
        return exit_code(code)

    def _kill(self) -> int:
        _log.warning("stopping at once: second signal")
        kill_group(self._server)
        return 128 + signal.SIGKILL
