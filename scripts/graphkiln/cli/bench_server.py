"""Figures of a `bench` run: their names, and those of the server, from Triton's counters and its CPU time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from graphkiln_backend.graph.errors import ClientError

if TYPE_CHECKING:
    from graphkiln_client import Model

PERCENTILES = ("p50", "p90", "p99", "p99.9")
# Triton's name of a stage -> ours.
STAGES = {"queue": "queue", "compute_input": "input", "compute_infer": "infer", "compute_output": "output"}


def cell(value: float | None, digits: int) -> str:
    """A number for a table; `-` where it is not known."""
    return "-" if value is None else f"{value:.{digits}f}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSide:
    """The server's part of a run; None for unknown values.

    Attributes:
        us: Mean microseconds of a request in each stage.
        batch: Mean rows of a batch.
        cores: CPU seconds of its processes, per second; known for a server on this machine.
    """

    us: dict[str, float | None]
    batch: float | None = None
    cores: float | None = None


UNKNOWN = ServerSide(us=dict.fromkeys(STAGES.values()))


class ServerWatch:
    """Reader of counters and CPU time of the server of a loaded model at the start and the end of a run."""

    def __init__(self, model: Model, url: str) -> None:
        self._model = model
        self._cpu_seconds = local_cpu_seconds(url)
        self._before: Mapping[str, Any] = {}
        self._begin_cpu_s = 0.0

    def start(self) -> None:
        """Take the first reading.

        Raises:
            ClientError: The server does not answer.
        """
        self._before = self._model.statistics()
        self._begin_cpu_s = self._cpu_seconds() if self._cpu_seconds else 0.0

    def side(self, seconds: float) -> ServerSide:
        """Differences over a run of `seconds`; unknown if the server was restarted, or is gone."""
        try:
            found = breakdown(self._before, self._model.statistics())
        except ClientError:  # what the client has measured is no less true
            return UNKNOWN
        cpu_s = self._cpu_seconds() - self._begin_cpu_s if self._cpu_seconds else -1.0
        return replace(found, cores=cpu_s / seconds) if found is not UNKNOWN and cpu_s >= 0 else found


def breakdown(before: Mapping[str, Any], after: Mapping[str, Any]) -> ServerSide:
    """The mean times of a successful request between two readings; `UNKNOWN` where a counter went back.

    Source: Triton's statistics extension.
    """
    old, new = _counters(before), _counters(after)
    grown = {name: new[name] - old[name] for name in new}
    if min(grown.values()) < 0:
        return UNKNOWN
    requests = grown["requests"]
    batch = grown["rows"] / grown["executions"] if requests and grown["executions"] else 0.0
    return ServerSide(us={name: grown[name] / max(requests, 1) / 1e3 for name in STAGES.values()}, batch=batch)


def _counters(statistics: Mapping[str, Any]) -> dict[str, int]:
    """Requests, rows, executions, and nanoseconds of each stage; 0 for what a server does not count."""
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
    address = urlsplit(url)
    if address.hostname not in ("localhost", "127.0.0.1", "::1"):
        return None
    sockets = psutil.net_connections("tcp")
    pids = {each.pid for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr[1:] == (address.port,)}
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
