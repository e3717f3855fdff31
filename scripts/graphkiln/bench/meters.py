"""Measure CPU time and memory of processes, energy, and the time that Triton spends in each stage of a request."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from graphkiln_backend.graph.errors import ClientError
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import psutil

    from graphkiln_client import Model
else:
    psutil = LazyModule("psutil")  # may be missing on a client's machine

# Stage in Triton's statistics -> key in our results.
STAGES = {"queue": "queue", "compute_input": "input", "compute_infer": "infer", "compute_output": "output"}


class ProcessMeter:
    """CPU time and memory of processes and their descendants, including those that start later."""

    def __init__(self, *pids: int) -> None:
        self._roots = [psutil.Process(pid) for pid in pids]

    @property
    def processes(self) -> list[psutil.Process]:
        """Running processes."""
        found = []
        for root in self._roots:
            with suppress(psutil.NoSuchProcess):
                found += [root, *root.children(recursive=True)]
        return found

    def cpu_s(self) -> float:
        """Return the CPU seconds of the running processes."""
        total = 0.0
        for process in self.processes:
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def memory_bytes(self) -> int | None:
        """Return the total PSS, which counts shared memory once; None if it cannot be read."""
        try:
            return sum(process.memory_full_info().pss for process in self.processes)
        except (psutil.Error, AttributeError):
            return None


_POWERCAP = Path("/sys/class/powercap")
# Counters of whole packages; those of their parts (`intel-rapl:0:1`) are included in them.
_PACKAGE = "intel-rapl:[0-9]*"


class EnergyMeter:
    """Energy in joules by RAPL and NVML. The GPU counters are not yet run on a GPU.

    Sources: Linux kernel, "Power Capping Framework" (`energy_uj`, `max_energy_range_uj`); NVML API reference,
    `nvmlDeviceGetTotalEnergyConsumption`.
    """

    def __init__(self, powercap: Path = _POWERCAP) -> None:
        self._packages = [path for path in powercap.glob(_PACKAGE) if path.name.count(":") == 1]
        self._before: Mapping[str, float] = {}

    def begin(self) -> None:
        """Take the first reading."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Return joules since `begin`; None if no counter could be read twice."""
        now, used = self._read(), {}
        for name in self._before.keys() & now.keys():
            used[name] = now[name] - self._before[name]
            if used[name] < 0:  # the counter wrapped around
                used[name] += (_read_number(Path(name) / "max_energy_range_uj") or 0.0) / 1e6
        return sum(used.values()) if used else None

    def _read(self) -> dict[str, float]:
        """Read all accessible counters in joules; some are readable by root only."""
        read = {str(path): _read_number(path / "energy_uj") for path in self._packages}
        return {**{name: value / 1e6 for name, value in read.items() if value is not None}, **_read_gpus()}


def _read_number(path: Path) -> float | None:
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _read_gpus() -> dict[str, float]:
    """Read the energy counter of each GPU in joules; empty without NVML, a driver or such counters."""
    try:
        import pynvml
    except ImportError:
        return {}
    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        read = pynvml.nvmlDeviceGetTotalEnergyConsumption
        return {f"gpu:{index}": read(handle) / 1e3 for index, handle in enumerate(handles)}
    except pynvml.NVMLError:
        return {}


def listening_meter(url: str) -> ProcessMeter | None:
    """Create a meter of the processes that listen on a local address; None if there are none."""
    address = urlsplit(url)
    if address.hostname not in ("localhost", "127.0.0.1", "::1"):
        return None
    try:
        sockets = psutil.net_connections("tcp")
    except ImportError:
        return None
    pids = {each.pid for each in sockets if each.status == psutil.CONN_LISTEN and each.laddr[1:] == (address.port,)}
    return ProcessMeter(*filter(None, pids)) if any(pids) else None


@dataclass(frozen=True, kw_only=True, slots=True)
class ServerSide:
    """Server statistics of a run; None for unknown values.

    Attributes:
        us: Mean microseconds per request in each stage.
        cores: CPU seconds per second of the server's processes; only for a server on this machine.
    """

    us: dict[str, float | None]
    batch: float | None = None
    cores: float | None = None


UNKNOWN = ServerSide(us=dict.fromkeys(STAGES.values()))


class ServerMeter:
    """Reads the counters and CPU time of a model's server at the start and the end of a run."""

    def __init__(self, model: Model, url: str) -> None:
        self._model, self._processes = model, listening_meter(url)
        self._before: Mapping[str, Any] = {}
        self._begin_cpu_s = 0.0

    def start(self) -> None:
        """Take the first reading.

        Raises:
            ClientError: The server does not answer.
        """
        self._before = self._model.statistics()
        self._begin_cpu_s = self._processes.cpu_s() if self._processes else 0.0

    def side(self, seconds: float) -> ServerSide:
        """Return the differences over a run of `seconds`; `UNKNOWN` if the server was restarted or has ended."""
        try:
            found = breakdown(self._before, self._model.statistics())
        except ClientError:  # the client's measurement is still valid
            return UNKNOWN
        cpu_s = self._processes.cpu_s() - self._begin_cpu_s if self._processes else -1.0
        return replace(found, cores=cpu_s / seconds) if found is not UNKNOWN and cpu_s > 0 else found


def breakdown(before: Mapping[str, Any], after: Mapping[str, Any]) -> ServerSide:
    """Compute mean times of successful requests between two readings; `UNKNOWN` if a counter decreased.

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
    """Read requests, rows, executions and nanoseconds of each stage; 0 for missing counters."""
    stages = statistics["inference_stats"]
    return {
        "requests": stages["success"].get("count", 0),
        "rows": statistics.get("inference_count", 0),
        "executions": statistics.get("execution_count", 0),
        **{name: stages.get(key, {}).get("ns", 0) for key, name in STAGES.items()},
    }
