"""What a server says of the time of one run of `graphkiln bench`: its own counters, its processes' processor time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphkiln_backend.graph.errors import ClientError

if TYPE_CHECKING:
    from graphkiln_client import Model

STAGES = {"queue": "queue", "compute_input": "input", "compute_infer": "infer", "compute_output": "output"}
"""What Triton calls them -> what we do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSide:
    """The server's part of a run. None stands for what is not known.

    Attributes:
        us: Mean microseconds of a request in each stage.
        batch: Mean rows of a batch.
        cores: Processor seconds of its processes, per second; known of a server on this machine.
    """

    us: dict[str, float | None]
    batch: float | None = None
    cores: float | None = None

    @property
    def is_known(self) -> bool:
        """Whether its counters tell of the run, and of nothing else."""
        return self.batch is not None


UNKNOWN = ServerSide(us=dict.fromkeys(STAGES.values()))


class ServerWatch:
    """Reads the counters, and the processor time, at the start and the end of a run.

    Args:
        model: Which is loaded.
        url: Of its server.
    """

    def __init__(self, model: Model, url: str) -> None:
        self._model = model
        self._cpu_seconds = local_cpu_seconds(url)
        self._before: Mapping[str, Any] = {}
        self._begin_cpu_s = 0.0

    def start(self) -> None:
        """Reads them for the first time.

        Raises:
            ClientError: The server cannot be asked.
        """
        self._before = self._model.statistics()
        self._begin_cpu_s = self._cpu_seconds() if self._cpu_seconds else 0.0

    def side(self, seconds: float) -> ServerSide:
        """What became of them in so many seconds; unknown where the server was started again, or is gone."""
        try:
            found = breakdown(self._before, self._model.statistics())
        except ClientError:  # what the client has measured is no less true
            return UNKNOWN
        cpu_s = self._cpu_seconds() - self._begin_cpu_s if self._cpu_seconds else -1.0
        cores = cpu_s / seconds if found.is_known and cpu_s >= 0 else None
        return ServerSide(us=found.us, batch=found.batch, cores=cores)


def breakdown(before: Mapping[str, Any], after: Mapping[str, Any]) -> ServerSide:
    """The mean times of a successful request between two readings; unknown where a counter went back.

    Source: Triton's statistics extension.
    """
    old, new = _counters(before), _counters(after)
    grown = {name: new[name] - old[name] for name in new}
    if min(grown.values()) < 0:
        return UNKNOWN
    requests = grown["requests"]
    us = {name: grown[name] / max(requests, 1) / 1e3 for name in STAGES.values()}
    batch = grown["rows"] / grown["executions"] if requests and grown["executions"] else 0.0
    return ServerSide(us={**us}, batch=batch)


def _counters(statistics: Mapping[str, Any]) -> dict[str, int]:
    """Requests, rows, executions, and the nanoseconds of each stage; 0 of what a server does not count."""
    stages = statistics["inference_stats"]
    return {
        "requests": stages["success"].get("count", 0),
        "rows": statistics.get("inference_count", 0),
        "executions": statistics.get("execution_count", 0),
        **{name: stages.get(key, {}).get("ns", 0) for key, name in STAGES.items()},
    }


def local_cpu_seconds(url: str) -> Callable[[], float] | None:
    """A function that reads the CPU seconds of the server's processes; None where they are not on this machine."""
    from urllib.parse import urlsplit

    try:
        import psutil
    except ImportError:
        return None
    port = urlsplit(url).port
    if urlsplit(url).hostname not in ("localhost", "127.0.0.1", "::1"):
        return None
    sockets = psutil.net_connections("tcp")
    pids = {socket.pid for socket in sockets if socket.status == psutil.CONN_LISTEN and socket.laddr[1:] == (port,)}
    processes = [psutil.Process(pid) for pid in pids if pid]
    family = [member for process in processes for member in (process, *process.children(recursive=True))]
    if not family:
        return None

    def seconds_of(member: psutil.Process) -> float:
        try:
            times = member.cpu_times()
        except psutil.Error:  # an instance that was started again, in another process
            return 0.0
        return float(times.user + times.system)

    return lambda: sum(map(seconds_of, family))
