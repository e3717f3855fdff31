"""What this machine is: processor, memory, container, clock, locale."""

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
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request, format_size

# The GPUs, and whether the driver is new enough for the CUDA libraries that are installed.
#
# Not yet run on a GPU: built from the documentation and tested without one.

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


# The limits that this process and its children run under.


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """A limit of the kernel.

    Attributes:
        subject: What it limits.
        resource: The kernel's number of it.
        least: The least that serving needs.
        flag: That of `ulimit`.
        is_size: Whether it is a number of bytes.
    """

    subject: str
    resource: int
    least: int
    flag: str
    is_size: bool = False


# Each connection is an open file; each instance some threads; runtimes reserve tens of GB of addresses.
LIMITS = (
    Limit(subject="open files", resource=resource.RLIMIT_NOFILE, least=1024, flag="-n"),
    Limit(subject="processes", resource=resource.RLIMIT_NPROC, least=512, flag="-u"),
    Limit(subject="address space", resource=resource.RLIMIT_AS, least=64 << 30, flag="-v", is_size=True),
    Limit(subject="file size", resource=resource.RLIMIT_FSIZE, least=4 << 30, flag="-f", is_size=True),
)


def check_limits(_: Request) -> Iterator[Finding]:
    """Each limit, and whether it is enough."""
    for limit in LIMITS:
        yield find_limit(limit, resource.getrlimit(limit.resource)[0])


def find_limit(limit: Limit, value: int) -> Finding:
    """One limit.

    Args:
        limit: Which.
        value: What it is now; -1 for none.
    """
    unlimited = value == resource.RLIM_INFINITY
    low = not unlimited and value < limit.least
    shown = format_size(value) if limit.is_size else str(value)
    return Finding(
        subject=limit.subject,
        level=Level.WARNING if low else Level.OK,
        message="no limit" if unlimited else f"at most {shown}",
        hint=f"ulimit {limit.flag} unlimited; in a container: docker run --ulimit; serving may need more"
        if low
        else "",
        facts={"limit": None if unlimited else value},
    )


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
