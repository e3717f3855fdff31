"""What the machine's own counters say of energy: RAPL for processors, NVML for GPUs; silent where neither can be read.

The counters of GPUs are not yet run on one: built from the documentation and tested without one.

Sources: Linux kernel, "Power Capping Framework" (`energy_uj`, `max_energy_range_uj`); NVML API reference,
`nvmlDeviceGetTotalEnergyConsumption`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

_POWERCAP = Path("/sys/class/powercap")
_PACKAGE = re.compile(r"intel-rapl:\d+")
"""Whole processors: their parts (`intel-rapl:0:1`) are in them already."""

Joules = Callable[[], Mapping[str, float]]
"""Counter -> joules since some moment."""


class EnergyMeter:
    """Joules between two moments.

    Args:
        powercap: The kernel's folder of counters.
        gpus: Reads the counters of the GPUs.
    """

    def __init__(self, powercap: Path = _POWERCAP, gpus: Joules | None = None) -> None:
        self._packages = _packages(powercap)
        self._gpus = gpus or _read_gpus
        self._before: Mapping[str, float] = {}

    def begin(self) -> None:
        """The first moment."""
        self._before = self._read()

    def joules(self) -> float | None:
        """Since then; None where nothing could be read at both moments."""
        now = self._read()
        shared = [name for name in self._before if name in now]
        return sum(self._since(name, now[name]) for name in shared) if shared else None

    def _since(self, name: str, now: float) -> float:
        """A counter starts again at 0 beyond its range."""
        used = now - self._before[name]
        path = self._packages.get(name)
        return used if used >= 0 or path is None else used + (_number(path / "max_energy_range_uj") or 0.0) / 1e6

    def _read(self) -> dict[str, float]:
        read = {name: _number(path / "energy_uj") for name, path in self._packages.items()}
        return {**{name: value / 1e6 for name, value in read.items() if value is not None}, **self._gpus()}


def _packages(powercap: Path) -> dict[str, Path]:
    if not powercap.is_dir():
        return {}
    return {path.name: path for path in sorted(powercap.iterdir()) if _PACKAGE.fullmatch(path.name)}


def _number(path: Path) -> float | None:
    """None where only the system's administrator may read it."""
    try:
        return float(path.read_text())
    except (OSError, ValueError):
        return None


def _read_gpus() -> dict[str, float]:
    nvml = _nvml()
    if nvml is None:
        return {}
    try:
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        return {
            f"gpu:{index}": nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3
            for index, handle in enumerate(handles)
        }
    except nvml.NVMLError:  # an older GPU has no such counter
        return {}


def _nvml() -> Any:
    """NVIDIA's library, ready; None where it or its driver is not there."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml
