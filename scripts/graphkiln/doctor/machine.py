"""Checks of this machine: processor, memory, container, clock, locale, limits and GPUs."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from importlib.metadata import distributions
from pathlib import Path

from graphkiln.doctor.examination import Finding, Request, graded
from graphkiln_backend.graph.files import format_size

# Instruction sets (names of the Linux kernel) that affect the speed of precisions.
_NOTABLE = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
_LITTLE_MEMORY_BYTES = 1 << 30
_CONTAINER_FILES = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}
# Architecture (`uname -m`) -> hint on Linux; "" if it is tested.
_HINTS = {
    "x86_64": "",
    "aarch64": "not tested on aarch64, although all wheels are available",
}
_NO_TRITON = "the tritonserver of nvidia-pytriton requires Linux on x86-64 or aarch64"
_OLDEST_TIME_S = 1_704_067_200  # 2024-01-01; an earlier time means that the clock was never set


def check_processor(_: Request) -> Iterator[Finding]:
    """Check the processor."""
    from graphkiln_backend.system.resources import usable_cores

    yield find_processor(Path("/proc/cpuinfo").read_text(), usable_cores(), os.cpu_count() or 1)


def check_memory(_: Request) -> Iterator[Finding]:
    """Check the memory."""
    from graphkiln_backend.system.resources import memory_groups

    limit_bytes = min((group.limit_bytes for group in memory_groups()), default=None)
    yield find_memory(Path("/proc/meminfo").read_text(), limit_bytes)


def check_system(_: Request) -> Iterator[Finding]:
    """Check operating system, clock and locale."""
    yield find_system(container(Path("/"), os.environ))
    yield find_clock(time.time(), Path(__file__).stat().st_mtime)
    yield find_locale(sys.getfilesystemencoding())


def find_processor(cpuinfo: str, usable: int, cores: int) -> Finding:
    """Describe the processor from /proc/cpuinfo, the number of usable cores and that of all cores."""
    fields = dict(re.findall(r"^([^\t\n]+?)\s*: (.*)$", cpuinfo, re.MULTILINE))
    present = set((fields.get("flags") or fields.get("Features", "")).split())
    notable = [name for name in _NOTABLE if name in present]
    model = fields.get("model name") or platform.processor() or platform.machine()
    of_all = "" if usable == cores else f" of {cores} (affinity or cgroup quota)"
    return Finding(
        subject="processor",
        message=f"{model}, {usable} cores{of_all}; {', '.join(notable) or 'no notable vector instructions'}",
        facts={"model": model, "usable_cores": usable, "cores": cores, "instruction_sets": notable},
    )


def find_memory(meminfo: str, limit_bytes: int | None) -> Finding:
    """Describe the usable memory from /proc/meminfo and the cgroup's limit."""
    sizes = {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    usable = min(total, limit_bytes or total)
    limited = f", limited to {format_size(usable)} by the cgroup" if usable < total else ""
    return graded(
        "memory",
        f"{format_size(total)}, {format_size(available)} available{limited}",
        warning=min(usable, available) < _LITTLE_MEMORY_BYTES,
        hint="an instance needs hundreds of megabytes: stop other programs or raise the limit",
        total_bytes=total,
        available_bytes=available,
        limit_bytes=limit_bytes,
    )


def container(root: Path, environment: Mapping[str, str]) -> str:
    """Return the type of the container of this process, or ""."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    return next((name for path, name in _CONTAINER_FILES.items() if (root / path.lstrip("/")).exists()), "")


def find_system(inside: str) -> Finding:
    """Describe the operating system and the container."""
    hint = _HINTS.get(platform.machine() if sys.platform == "linux" else sys.platform, _NO_TRITON)
    name, machine, user = platform.system(), platform.machine(), os.geteuid()
    return graded(
        "system",
        f"{name} {platform.release()} on {machine}, {inside or 'no container'}, user {user}",
        warning=hint,
        hint=hint,
        system=name,
        machine=machine,
        container=inside,
        user=user,
    )


def find_clock(now_s: float, installed_s: float) -> Finding:
    """Check the clock against the time of the installation: certificates and caches depend on it."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    wrong = now_s < max(_OLDEST_TIME_S, installed_s - 86400)
    return graded(
        "clock",
        f"{shown}, before graphkiln was installed" if wrong else shown,
        warning=wrong,
        hint="set the clock (chronyd, systemd-timesyncd): certificates are considered invalid until then",
        epoch_s=round(now_s, 3),
    )


def find_locale(encoding: str) -> Finding:
    """Check the encoding of file names."""
    return graded(
        "locale",
        f"file names are {encoding}",
        warning=encoding.lower().replace("-", "") != "utf8",
        hint="export LC_ALL=C.UTF-8: other characters in names of models and labels are lost",
        file_names=encoding,
    )


# Limit -> its number, the minimum for serving, and the flag of `ulimit`. Each connection is an open file, each instance
# needs some threads, and runtimes reserve tens of GiB of address space.
LIMITS = {
    "open files": (resource.RLIMIT_NOFILE, 1024, "-n"),
    "processes": (resource.RLIMIT_NPROC, 512, "-u"),
    "address space": (resource.RLIMIT_AS, 64 << 30, "-v"),
    "file size": (resource.RLIMIT_FSIZE, 4 << 30, "-f"),
}
_SIZES = ("address space", "file size")


def check_limits(_: Request) -> Iterator[Finding]:
    """Check the resource limits of this process and its children."""
    for subject, (number, _least, _flag) in LIMITS.items():
        yield find_limit(subject, resource.getrlimit(number)[0])


def find_limit(subject: str, value: int) -> Finding:
    """Describe a limit and its value."""
    _, least, flag = LIMITS[subject]
    unlimited = value == resource.RLIM_INFINITY
    shown = format_size(value) if subject in _SIZES else str(value)
    return graded(
        subject,
        "no limit" if unlimited else f"at most {shown}",
        warning=not unlimited and value < least,
        hint=f"serving may need more: ulimit {flag} unlimited; in a container: docker run --ulimit",
        limit=None if unlimited else value,
    )


# GPUs, and compatibility of the driver with the installed CUDA libraries. Not yet run on a GPU.

_RUNTIME = re.compile(r"nvidia-cuda-runtime(-cu\d+)?")
_TIMEOUT_S = 15


def check_gpu(_: Request) -> Iterator[Finding]:
    """Check GPUs, driver and CUDA."""
    from graphkiln_backend.engines.hardware import VISIBLE_GPUS, gpus

    names = [str(gpu) for gpu in gpus()]
    yield find_gpus(names, has_driver=Path("/dev/nvidiactl").exists(), chosen=os.environ.get(VISIBLE_GPUS))
    if names:
        yield find_cuda(read_driver_cuda(), installed_cuda())


def find_gpus(names: list[str], *, has_driver: bool, chosen: str | None = None) -> Finding:
    """Describe the GPUs.

    Args:
        names: Names of the visible GPUs.
        has_driver: The driver's device exists.
        chosen: Value of `CUDA_VISIBLE_DEVICES`; None if it is not set.
    """
    hidden = has_driver and not names
    message, hint = "; ".join(names) or "none: models run on the CPU", ""
    if hidden and chosen is not None:
        message = f"CUDA_VISIBLE_DEVICES='{chosen}' hides all GPUs: models run on the CPU"
        hint = "unset it, or set it to GPUs of nvidia-smi -L"
    elif hidden:
        message = "the driver's device exists, but nvidia-smi shows no GPU"
        hint = "check nvidia-smi; after an update of the driver, restart the machine"
    return graded("GPUs", message, warning=hidden, hint=hint, gpus=names)


def find_cuda(driver: str, libraries: Mapping[str, str]) -> Finding:
    """Compare the driver's CUDA release with the installed libraries (distribution -> version).

    A driver supports libraries of its major release and older ones. Source: NVIDIA, "CUDA Compatibility".
    """
    named = [f"{name} {version}" for name, version in libraries.items()]
    newer = [each for each in named if driver and _major(each.rpartition(" ")[2]) > _major(driver)]
    return graded(
        "CUDA",
        f"the driver supports CUDA {driver or 'of an unknown release'}; {', '.join(named) or 'no CUDA from pip'}",
        warning=newer,
        hint=f"update the driver, or install an older {newer[0]}" if newer else "",
        driver_cuda=driver,
        libraries=named,
    )


def _major(version: str) -> int:
    return int(version.split(".", maxsplit=1)[0])


def read_driver_cuda() -> str:
    """Return the newest CUDA release that the driver supports, or ""."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    shown = subprocess.run([program], capture_output=True, text=True, check=False, timeout=_TIMEOUT_S).stdout
    found = re.search(r"CUDA Version:\s*([\d.]+)", shown)
    return found[1] if found else ""


def installed_cuda() -> dict[str, str]:
    """Return distribution -> version of the CUDA runtimes in this Python environment."""
    found = {each.metadata["Name"]: each.version for each in distributions()}
    return {name: version for name, version in found.items() if name and _RUNTIME.fullmatch(name)}
