"""Processor and GPUs of this machine, as far as compiled artifacts depend on them.

GPUs: not yet run on one; built from the documentation, and tested with a stub of `nvidia-smi`.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from graphkiln_backend.graph.device import Device
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.precision import Precision

_CPUINFO = Path("/proc/cpuinfo")
_GPU_FIELDS = ("uuid", "name", "compute_cap", "driver_version")
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"  # environment variable: selects and renumbers the GPUs of a process
# Flags in /proc/cpuinfo on x86 and Arm of instructions that multiply in a precision.
_INSTRUCTIONS = {
    Precision.BF16: ("avx512_bf16", "amx_bf16", "bf16"),
    Precision.FP16: ("avx512_fp16", "amx_fp16", "asimdhp"),
}

# Instructions that add products of bytes in 32 bits. Without them x86 uses `vpmaddubsw`, which adds in 16 bits.
_SUMS_OF_BYTES = ("avx512_vnni", "avx_vnni", "amx_int8")


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """An NVIDIA GPU: its name, compute capability (`9.0`) and the driver's version."""

    name: str
    compute_capability: str
    driver: str

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.compute_capability}, driver {self.driver}"


def identity(device: Device) -> str:
    """Return a name of the device; devices with equal names run the same compiled code.

    Raises:
        EngineUnavailable: There is no such GPU.
    """
    return str(gpu(device)) if device.is_gpu else _cpu()


def cpu_name() -> str:
    """Return the processor's name."""
    # platform.processor() starts a program; x86 does not need it.
    return _fields().get("model name") or platform.processor() or platform.machine()


def gpu(device: Device) -> Gpu:
    """Look up a GPU.

    Raises:
        EngineUnavailable: There is no such GPU; the message names the GPUs of the machine.
    """
    found = gpus()
    if device.index >= len(found):
        present = ", ".join(f"{Device.gpu(index)} ({model.name})" for index, model in enumerate(found)) or "none"
        raise EngineUnavailable(
            f"there is no GPU {device.index} here; GPUs: {present}",
            hint="change `gpus` of the instance_group, give the container its GPUs (docker run --gpus all), or use "
            "KIND_CPU",
        )
    return found[device.index]


def missing_instructions(precision: Precision) -> str:
    """Return the reason why this CPU does not compute in a precision natively; empty if it does, or if unknown."""
    flags, names = _flags(), _INSTRUCTIONS.get(precision, ())
    if not flags or not names or flags.intersection(names):
        return ""
    return f"this CPU has no instructions for {precision} ({', '.join(names)})"


def saturates_products_of_bytes() -> bool:
    """Return true if the fast int8 product saturates sums at 16 bits, as on x86 without VNNI.

    Observed with values near the ends of their range: an error of 45% of the signal, in ONNX Runtime 1.32 (with default
    options) and OpenVINO 2026.4.
    """
    flags = _flags()
    return "avx2" in flags and flags.isdisjoint(_SUMS_OF_BYTES)


@cache
def gpus() -> tuple[Gpu, ...]:
    """Return the GPUs visible to this process, in order; empty without a driver.

    Source: `nvidia-smi --help-query-gpu`; CUDA C++ Programming Guide, "CUDA Environment Variables".
    """
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    import csv  # importing these two takes 3 ms, which instances without GPUs save
    import subprocess

    command = [program, f"--query-gpu={','.join(_GPU_FIELDS)}", "--format=csv,noheader"]
    try:
        listed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    except (subprocess.SubprocessError, OSError):  # without a driver no GPU can be used
        return ()
    rows = [
        row for row in csv.reader(listed.stdout.splitlines(), skipinitialspace=True) if len(row) == len(_GPU_FIELDS)
    ]
    found = {
        uuid: Gpu(name=name, compute_capability=capability, driver=driver) for uuid, name, capability, driver in rows
    }
    chosen = os.environ.get(VISIBLE_GPUS)
    return tuple(found.values()) if chosen is None else tuple(_choose(chosen, found))


def _choose(chosen: str, found: Mapping[str, Gpu]) -> Iterator[Gpu]:
    """Yield the GPUs of `CUDA_VISIBLE_DEVICES`, up to the first unknown name."""
    for name in map(str.strip, chosen.split(",")):
        if name.isdecimal():
            matching = [*found.values()][int(name) : int(name) + 1]
        elif name.startswith("MIG-"):  # a part of a GPU; the list does not show of which one
            matching = [*found.values()][:1]
        else:
            matching = [gpu for uuid, gpu in found.items() if name and uuid.startswith(name)]
        if len(matching) != 1:
            return
        yield matching[0]


def _fields() -> dict[str, str]:
    return dict(re.findall(r"^([^\t\n]+?)\s*: (.*)$", _CPUINFO.read_text(), re.MULTILINE))


def _flags() -> frozenset[str]:
    """The instruction sets."""
    fields = _fields()
    return frozenset((fields.get("flags") or fields.get("Features", "")).split())


@cache
def _cpu() -> str:
    """Model name and a digest of the instruction sets."""
    digest = hashlib.sha256(" ".join(sorted(_flags())).encode()).hexdigest()[:16]
    return f"{cpu_name()}, instruction sets {digest}"
