"""The GPUs, and whether the driver is new enough for the CUDA libraries that are installed.

Not yet run on a GPU: built from the documentation and tested without one.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request

_DRIVER = Path("/dev/nvidiactl")
_RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
_TIMEOUT_S = 15


def check_gpu(_: Request) -> Iterator[Finding]:
    """GPUs, driver, CUDA."""
    from graphkiln_backend.engines.hardware import VISIBLE_GPUS, gpus

    names, chosen = [str(gpu) for gpu in gpus()], os.environ.get(VISIBLE_GPUS)
    yield find_gpus(names, has_driver=_DRIVER.exists(), chosen=chosen)
    if names:
        yield find_cuda(read_driver_cuda(), installed_cuda())


def find_gpus(names: list[str], *, has_driver: bool, chosen: str | None = None) -> Finding:
    """The GPUs.

    Args:
        names: Of each.
        has_driver: Whether the driver's device is there.
        chosen: What `CUDA_VISIBLE_DEVICES` says; None where it is not set.
    """
    hidden = has_driver and not names
    message = "; ".join(names) or "none: models run on the CPU"
    way_out = ""
    if hidden and chosen is not None:
        message = f"CUDA_VISIBLE_DEVICES='{chosen}' shows none: models run on the CPU"
        way_out = "unset it, or name GPUs of nvidia-smi -L in it"
    elif hidden:
        message = "the driver's device is there, but nvidia-smi shows no GPU"
        way_out = "does nvidia-smi run? after an update of the driver, restart the machine"
    return Finding(
        subject="GPUs",
        level=Level.WARNING if hidden else Level.OK,
        message=message,
        hint=way_out,
        facts={"gpus": names},
    )


def find_cuda(driver: str, libraries: dict[str, str]) -> Finding:
    """Whether the driver fits the libraries. A driver runs what was built for its own major release and older ones.

    Args:
        driver: The CUDA release that the driver knows, or empty.
        libraries: Distribution -> version of each CUDA runtime that is installed.

    Source: NVIDIA, "CUDA Compatibility".
    """
    newer = [f"{name} {version}" for name, version in libraries.items() if driver and _major(version) > _major(driver)]
    present = ", ".join(f"{name} {version}" for name, version in libraries.items()) or "no CUDA library from pip"
    return Finding(
        subject="CUDA",
        level=Level.WARNING if newer else Level.OK,
        message=f"the driver knows CUDA {driver or 'of an unknown release'}; {present}",
        hint=f"update the driver, or install an older {newer[0]}" if newer else "",
        facts={"driver_cuda": driver, "libraries": [f"{name} {version}" for name, version in libraries.items()]},
    )


def read_driver_cuda() -> str:
    """The newest CUDA release that the driver knows, or empty."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    shown = subprocess.run([program], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S).stdout
    found = re.search(r"CUDA Version:\s*([\d.]+)", shown)
    return found[1] if found else ""


def installed_cuda() -> dict[str, str]:
    """Distribution -> version of each CUDA runtime in this Python environment."""
    found = {each.metadata["Name"]: each.version for each in distributions()}
    return {name: version for name, version in found.items() if name and _RUNTIME.fullmatch(name)}


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])
