"""What this machine is: processor, memory, container, clock, locale."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request, format_size

_CPUINFO = Path("/proc/cpuinfo")
_MEMINFO = Path("/proc/meminfo")
# Instruction sets, by the kernel's names, that decide how fast a precision is.
_NOTABLE = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
_LITTLE_MEMORY_BYTES = 1 << 30
_CONTAINER_FILES = {"/.dockerenv": "Docker", "/run/.containerenv": "Podman"}
# What to know of Linux on a processor, as `uname -m` calls it; empty where everything is tested.
_HINTS = {
    "x86_64": "",
    "aarch64": "no test of this project has run on aarch64, although all wheels exist for it, Triton's among them",
}
_NO_TRITON = "the tritonserver inside nvidia-pytriton runs on Linux, on x86-64 and aarch64"
_OLDEST_TIME_S = 1_704_067_200  # 2024-01-01: a clock before that was never set


def check_processor(_: Request) -> Iterator[Finding]:
    """The processor."""
    from graphkiln_backend.system.resources import usable_cores

    yield find_processor(_CPUINFO.read_text(), usable_cores(), os.cpu_count() or 1)


def check_memory(_: Request) -> Iterator[Finding]:
    """The memory."""
    from graphkiln_backend.system.resources import memory_groups

    limit_bytes = min((group.limit_bytes for group in memory_groups()), default=None)
    yield find_memory(_MEMINFO.read_text(), limit_bytes)


def check_system(_: Request) -> Iterator[Finding]:
    """Operating system, clock and locale."""
    yield find_system(container(Path("/"), os.environ))
    yield find_clock(time.time(), Path(__file__).stat().st_mtime)
    yield find_locale(sys.getfilesystemencoding())


def find_processor(cpuinfo: str, usable: int, cores: int) -> Finding:
    """The processor.

    Args:
        cpuinfo: The kernel's description.
        usable: Cores that this process may use.
        cores: Cores of the machine.
    """
    fields = dict(re.findall(r"^([^\t\n]+?)\s*: (.*)$", cpuinfo, re.MULTILINE))
    present = set((fields.get("flags") or fields.get("Features", "")).split())
    notable = [name for name in _NOTABLE if name in present]
    model = fields.get("model name") or platform.processor() or platform.machine()
    of_all = "" if usable == cores else f" of {cores} (affinity or cgroup quota)"
    return Finding(
        subject="processor",
        message=f"{model}, {usable} cores{of_all}; {', '.join(notable) or 'no vector instructions worth naming'}",
        facts={"model": model, "usable_cores": usable, "cores": cores, "instruction_sets": notable},
    )


def find_memory(meminfo: str, limit_bytes: int | None) -> Finding:
    """The memory that this process may use.

    Args:
        meminfo: The kernel's description.
        limit_bytes: The cgroup's limit.
    """
    sizes = {name: int(size) << 10 for name, size in re.findall(r"^(\w+):\s+(\d+) kB$", meminfo, re.MULTILINE)}
    total, available = sizes["MemTotal"], sizes["MemAvailable"]
    usable = min(total, limit_bytes or total)
    little = min(usable, available) < _LITTLE_MEMORY_BYTES
    limited = f", limited to {format_size(usable)} by the cgroup" if usable < total else ""
    return Finding(
        subject="memory",
        level=Level.WARNING if little else Level.OK,
        message=f"{format_size(total)}, {format_size(available)} available{limited}",
        hint="an instance takes hundreds of megabytes: end other programs or raise the limit" if little else "",
        facts={"total_bytes": total, "available_bytes": available, "limit_bytes": limit_bytes},
    )


def container(root: Path, environment: Mapping[str, str]) -> str:
    """What contains this process, or empty."""
    if "KUBERNETES_SERVICE_HOST" in environment:
        return "Kubernetes"
    return next((name for path, name in _CONTAINER_FILES.items() if (root / path.lstrip("/")).exists()), "")


def find_system(inside: str) -> Finding:
    """The operating system.

    Args:
        inside: What contains this process, or empty.
    """
    system = platform.machine() if sys.platform == "linux" else sys.platform
    hint = _HINTS.get(system, _NO_TRITON)
    return Finding(
        subject="system",
        level=Level.WARNING if hint else Level.OK,
        message=f"{platform.system()} {platform.release()} on {platform.machine()}, {inside or 'no container'}, "
        f"user {os.geteuid()}",
        hint=hint,
        facts={"system": platform.system(), "machine": platform.machine(), "container": inside, "user": os.geteuid()},
    )


def find_clock(now_s: float, installed_s: float) -> Finding:
    """The clock: certificates and caches are wrong where it is.

    Args:
        now_s: What it shows, in seconds of the epoch.
        installed_s: When graphkiln was installed.
    """
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now_s))
    wrong = now_s < max(_OLDEST_TIME_S, installed_s - 86400)
    return Finding(
        subject="clock",
        level=Level.WARNING if wrong else Level.OK,
        message=f"{shown}, before graphkiln was installed" if wrong else shown,
        hint="set it (chronyd, systemd-timesyncd): certificates seem invalid until then" if wrong else "",
        facts={"epoch_s": round(now_s, 3)},
    )


def find_locale(encoding: str) -> Finding:
    """The encoding of file names."""
    fits = encoding.lower().replace("-", "") == "utf8"
    return Finding(
        subject="locale",
        level=Level.OK if fits else Level.WARNING,
        message=f"file names are {encoding}",
        hint="" if fits else "export LC_ALL=C.UTF-8: other letters in names of models and labels are lost",
        facts={"file_names": encoding},
    )
