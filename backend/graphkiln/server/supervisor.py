"""Runs tritonserver as a child: environment, readiness, signals, draining, exit code, and no trace left behind.

Why the supervisor ends a drained server itself: on SIGTERM, Triton (24.10) first waits for every HTTP connection to be
closed by its client. An idle keep-alive connection never is, so the bare server waits for all of its
`--exit-timeout-secs` (30 s) and then exits with code 1, although nothing was left to do. Each of our instances counts
the batches that it has begun and ended; when all have been idle for `_SETTLE_S` after SIGTERM, no request is in flight
and the server is ended. Models of other backends keep no such count: where one is loaded, Triton's own wait decides.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln.repository.overlay import build_overlay
from graphkiln.server.flags import Endpoint, TritonFlags
from graphkiln.server.installation import Installation
from graphkiln.server.probe import ModelState, is_live, model_states
from graphkiln.server.runfolder import RunFolder
from graphkiln.triton.environment import to_environment
from graphkiln.triton.instance_status import read_counters

_POLL_S = 0.05
_SETTLE_S = 2.0
"""Longer than the time between a request's last byte and its batch; short enough to end within 5 s."""
_PR_SET_PDEATHSIG = 1  # Source: prctl(2)

_COMPLETION_FLAGS = {"disable-auto-complete-config", "strict-model-config", "model-config-name", "load-model"}
_NVIDIA_DRIVER = Path("/dev/nvidiactl")


def command_line(
    installation: Installation, folder: RunFolder, stores: Sequence[Path], flags: TritonFlags, *, complete: bool
) -> list[str]:
    """Tritonserver's command line: the user's arguments as typed, and our defaults where the user gave none.

    Args:
        installation: The server to run.
        folder: The run's folder, backends assembled.
        stores: Model stores, or their mirrors.
        flags: The user's flags.
        complete: Whether every configuration in the stores is complete, so that Triton need not complete any.
    """
    defaults = {"log-info": "false", "cache-directory": str(installation.caches)}
    if not _NVIDIA_DRIVER.exists():
        # Without a GPU these only produce errors about missing drivers, in which a real error would drown.
        defaults |= {"allow-gpu-metrics": "false", "enable-peer-access": "false", "pinned-memory-pool-byte-size": "0"}
    if "log-verbose" in flags.values:
        del defaults["log-info"]
    return [
        str(installation.binary),
        *(f"--model-repository={store}" for store in stores),
        f"--backend-directory={folder.backends}",
        f"--backend-config=python,shm-region-prefix-name={folder.shared_memory_prefix}",
        *(f"--{name}={value}" for name, value in defaults.items() if name not in flags.values),
        *(("--disable-auto-complete-config",) if complete else ()),
        *flags.arguments,
    ]


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """What `graphkiln serve` was asked for beyond tritonserver's own flags.

    Attributes:
        engines: Model name -> engine that the command line asks for.
        replace_onnxruntime: Whether our backend stands in for an installed C++ `onnxruntime` backend.
    """

    engines: Mapping[str, str] = field(default_factory=dict)
    replace_onnxruntime: bool = False


class Supervisor:
    """One run of tritonserver.

    Args:
        installation: The server to run.
        stores: Model stores.
        flags: The user's flags.
        options: What else was asked for.
        on_live: Called once with the state of every model, when the server answers.
        say: Called with one line at each event that a user should know of.
    """

    def __init__(
        self,
        installation: Installation,
        stores: Sequence[Path],
        flags: TritonFlags,
        options: ServeOptions,
        *,
        on_live: Callable[[list[ModelState]], None],
        say: Callable[[str], None],
    ) -> None:
        self._installation = installation
        self._stores = stores
        self._flags = flags
        self._options = options
        self._on_live = on_live
        self._say = say
        self._http = flags.endpoint("http")
        self._stop_signals = 0

    def run(self) -> int:
        """Serves until the server ends.

        Returns:
            The server's exit code; 0 when it was ended after a complete drain; 128 + N when signal N killed it.
        """
        with RunFolder() as folder, _signals_to(self._on_signal) as wake:
            ours = folder.assemble_backends(
                self._installation, self._flags.backends, replace_onnxruntime=self._options.replace_onnxruntime
            )
            stores = folder.link_stores(self._stores)
            mirrors = build_overlay(stores, folder.overlay, ours) if self._may_complete() else None
            with subprocess.Popen(
                command_line(self._installation, folder, mirrors or stores, self._flags, complete=bool(mirrors)),
                env=self._environment(folder),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - one prctl, before any thread exists
            ) as server:
                try:
                    return self._supervise(server, folder, wake)
                finally:
                    _kill_group(server)

    def _may_complete(self) -> bool:
        """Whether the stores can be mirrored: not while they may change, and not against the user's own flags."""
        control = self._flags.values.get("model-control-mode", "none")
        return control == "none" and not _COMPLETION_FLAGS & self._flags.values.keys()

    def _environment(self, folder: RunFolder) -> dict[str, str]:
        return {
            **os.environ,
            "LD_LIBRARY_PATH": self._installation.library_path,
            # Triton's stub takes no PYTHONPATH; it finds its interpreter's packages through `python3` on the PATH.
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
            "TMPDIR": str(folder.temporary),
            **to_environment(folder.instances, self._options.engines),
        }

    def _supervise(self, server: subprocess.Popen[bytes], folder: RunFolder, wake: socket.socket) -> int:
        live = False
        while (code := server.poll()) is None:
            if self._stop_signals:
                return self._stop(server, folder, wake, live=live)
            if not live and self._answers():
                live = True
                self._on_live(self._states(folder))
            _wait(server, wake, None if live else _POLL_S)
        return _exit_code(code)

    def _answers(self) -> bool:
        if self._http:
            return is_live(self._http)
        # Triton opens its ports only when loading is over, so an open port of another protocol says the same.
        return any(_accepts(endpoint) for endpoint in self._flags.endpoints())

    def _states(self, folder: RunFolder) -> list[ModelState]:
        return model_states(self._http, folder.instances) if self._http else []

    def _stop(self, server: subprocess.Popen[bytes], folder: RunFolder, wake: socket.socket, *, live: bool) -> int:
        self._say("stopping: finishing the requests in flight")
        countable = not live or self._all_models_ours(folder)
        server.send_signal(signal.SIGTERM)
        counters = read_counters(folder.instances)
        idle_since = time.monotonic()
        while (code := server.poll()) is None:
            if self._stop_signals > 1:
                self._say("stopping at once: second signal")
                _kill_group(server)
                return 128 + signal.SIGKILL
            _wait(server, wake, _POLL_S)
            before, counters = counters, read_counters(folder.instances)
            if counters != before or any(begun != ended for begun, ended in counters.values()):
                idle_since = time.monotonic()
            if countable and time.monotonic() - idle_since > _SETTLE_S:
                self._say("stopped: nothing was in flight")
                return 0
        self._say("stopped" if code == 0 else f"tritonserver ended with code {_exit_code(code)}")
        return _exit_code(code)

    def _all_models_ours(self, folder: RunFolder) -> bool:
        """Whether every loaded model counts its batches. Without HTTP there is no connection to wait for."""
        try:
            return all(state.status for state in self._states(folder) if state.state == "READY")
        except OSError:
            return False

    def _on_signal(self) -> None:
        self._stop_signals += 1


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


def _wait(server: subprocess.Popen[bytes], wake: socket.socket, timeout_s: float | None) -> None:
    """Sleeps until the server ends, a signal comes, or the time is over."""
    ended = os.pidfd_open(server.pid)
    try:
        ready, _, _ = select.select([ended, wake.fileno()], [], [], timeout_s)
    finally:
        os.close(ended)
    if wake.fileno() in ready:
        wake.recv(4096)


def _accepts(endpoint: Endpoint) -> bool:
    try:
        socket.create_connection(endpoint.local_address, timeout=1).close()
    except OSError:
        return False
    return True


def _exit_code(code: int) -> int:
    return code if code >= 0 else 128 - code


def _die_with_parent() -> None:
    """In the child: get SIGTERM when the supervisor itself is killed, so that no server is orphaned."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _kill_group(server: subprocess.Popen[bytes]) -> None:
    """Ends the server and its stubs, whatever state they are in."""
    try:
        os.killpg(server.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    server.wait()
