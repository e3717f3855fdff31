"""What a server of ours does to this machine while it is loaded: memory, CPU time, and whether its processes live."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import psutil

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.server.metrics_port import fetch_metrics

_SERVING = ("tritonserver", "triton_python_backend_stub")
"""Names, or parts of the first word, of the processes without which requests fail."""
_INFO = re.compile(r"^graphkiln_instance_info\{([^}]*)\} 1(?:\.0+)?$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, kw_only=True, slots=True)
class Placed:
    """What really serves, read back from an instance.

    Attributes:
        engine: That runs the graph.
        precision: That most of the arithmetic is computed in.
        device: Where.
    """

    engine: str
    precision: str
    device: str

    def __str__(self) -> str:
        return f"{self.engine} on {self.device} in {self.precision}"


class ServerWatch:
    """The processes of one server.

    Args:
        pid: Of its supervisor.
    """

    def __init__(self, pid: int) -> None:
        self._supervisor = psutil.Process(pid)
        self._serving = _serving(self._family())

    def memory_bytes(self) -> int | None:
        """PSS of all processes together: what they share counts once; None where the kernel does not tell."""
        try:
            return sum(process.memory_full_info().pss for process in self._family())
        except (psutil.Error, AttributeError):
            return None

    def cpu_s(self) -> float:
        """CPU seconds of all processes that live, so far."""
        return sum(_cpu_s(process) for process in self._family())

    def death(self) -> str:
        """Which process that served has ended since; empty where all live."""
        if not is_alive(self._supervisor):
            return "the server ended"
        alive = {process.pid for process in self._family() if is_alive(process)}
        gone = [name for pid, name in self._serving.items() if pid not in alive]
        return f"{gone[0]} was killed or crashed" if gone else ""

    def _family(self) -> Sequence[psutil.Process]:
        try:
            return [self._supervisor, *self._supervisor.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@dataclass(frozen=True, kw_only=True, slots=True)
class CpuTime:
    """CPU seconds at a moment of a monotonic clock."""

    moment_s: float
    cpu_s: float

    def cores_until(self, later: Self) -> float:
        """Cores that were busy between two readings."""
        return max(0.0, later.cpu_s - self.cpu_s) / max(later.moment_s - self.moment_s, 1e-9)


def read_placement(metrics_url: str, model: str) -> tuple[Placed, ...]:
    """What each instance of a model serves with.

    Raises:
        MeasurementError: The server does not tell.
    """
    try:
        text = fetch_metrics(metrics_url)
    except OSError as error:
        raise MeasurementError(f"the server's metrics cannot be read: {error}") from error
    return parse_placement(text, model)


def parse_placement(metrics: str, model: str) -> tuple[Placed, ...]:
    """What the instances of a model say of themselves in the text of a metrics page."""
    rows = [dict(_LABEL.findall(labels)) for labels in _INFO.findall(metrics)]
    return tuple(_placed(row) for row in rows if row.get("model") == model)


def _placed(row: Mapping[str, str]) -> Placed:
    return Placed(engine=row.get("engine", ""), precision=row.get("precision", ""), device=row.get("device", ""))


def _serving(family: Sequence[psutil.Process]) -> dict[int, str]:
    found = {}
    for process in family:
        try:
            word = process.cmdline()[0].rpartition("/")[2] if process.cmdline() else process.name()
        except psutil.Error:
            continue
        if word.startswith(_SERVING):
            found[process.pid] = word
    return found


def is_alive(process: psutil.Process) -> bool:
    """A process that ended and that nobody asked about is still listed."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _cpu_s(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return float(times.user + times.system)
