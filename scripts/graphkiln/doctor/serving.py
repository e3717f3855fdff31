"""Checks of Python packages, tritonserver, HAProxy and ports."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln.doctor.examination import Finding, Level, Request, graded, refused

if TYPE_CHECKING:
    from graphkiln_backend.server.flags import ListenAddress, TritonFlags

_OWN = "graphkiln"
_SERVING = "serve"
_WHEEL = "nvidia-pytriton"
SHOWN = (_OWN, "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "openvino", _WHEEL, "tritonclient")
# Distributions that contain the same files: the one installed last overwrites the other.
_EXCLUSIVE = (("onnxruntime", "onnxruntime-gpu"),)


def check_packages(_: Request) -> Iterator[Finding]:
    """Check Python, package versions and conflicts."""
    versions = installed_versions(SHOWN)
    python = platform.python_version()
    message = f"{platform.python_implementation()} {python}"
    yield Finding(subject="Python", message=message, facts={"version": python})
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    yield Finding(subject="versions", message=shown or "none is installed", facts=dict(versions))
    yield from find_conflicts(versions)
    yield from find_unmet(_OWN, _SERVING)
    for name in versions:
        if name != _OWN:
            yield from find_unmet(name)


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed distributions among `names`."""
    found = {}
    for name in names:
        try:
            found[name] = distribution(name).version
        except PackageNotFoundError:
            continue
    return found


def find_conflicts(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Find distributions that conflict."""
    for names in _EXCLUSIVE:
        if all(name in versions for name in names):
            yield Finding(
                subject=" and ".join(names),
                level=Level.WARNING,
                message="overwrite each other's files",
                hint=f"pip uninstall {' '.join(names)}, then install one of them",
            )


def find_unmet(name: str, extra: str = "") -> Iterator[Finding]:
    """Find unmet requirements of a distribution and optionally of one of its extras."""
    from packaging.requirements import Requirement

    try:
        requirements = distribution(name).requires or []
    except PackageNotFoundError:
        return
    for requirement in map(Requirement, requirements):
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": extra})
        if not applies or requirement.name == name:
            continue
        found = installed_versions([requirement.name]).get(requirement.name)
        if found is None and (requirement.name == _WHEEL or _is_replaced(requirement.name)):
            continue  # Triton containers have another server, which `check_triton` finds
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            yield graded(
                name,
                f"needs {requirement.name}{requirement.specifier}, found {found or 'none'}",
                error=found is None and name == _OWN,
                warning=True,
                hint=f"pip install '{requirement.name}{requirement.specifier}'",
                requirement=str(requirement),
                found=found,
            )


def _is_replaced(name: str) -> bool:
    """Return true if another distribution with the same files is installed."""
    others = {other for names in _EXCLUSIVE if name in names for other in names}
    return bool(installed_versions(sorted(others)))


def check_triton(request: Request) -> Iterator[Finding]:
    """Check that tritonserver exists, starts and supports the flags; report known vulnerabilities."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.advisories import CURRENT, assess
    from graphkiln_backend.server.flags import TritonFlags
    from graphkiln_backend.server.installation import find_installation

    try:
        installation = find_installation()
        known_flags = installation.flags
        flags = TritonFlags.parse(request.arguments, known_flags)
    except ServerSetupError as error:
        yield refused("tritonserver", error)
        return
    yield Finding(
        subject="tritonserver",
        message=f"{installation.title}, {len(known_flags)} flags, {installation.binary}",
        facts={"version": installation.version, "binary": str(installation.binary), "flags": len(known_flags)},
    )
    found = assess(installation, flags, has_key=True)
    names = [f"{row.fixed} {', '.join(row.ids)}: {row.about}" for row in found.reachable]
    yield graded("advisories", str(found), warning=names, hint=CURRENT, reachable=names, date=found.date)


def backend_folders_of(request: Request) -> list[Path]:
    """Return the backend directories of `serve` that exist, in order of precedence."""
    from graphkiln_backend.server.run_folder import backend_folders

    return [folder for folder in backend_folders(_read_flags(request).backends) if folder.is_dir()]


def check_backends(request: Request) -> Iterator[Finding]:
    """Name the C++ backends of Triton; its Python backend, in which graphkiln runs, is not one of them."""
    from graphkiln_backend.lowering.seat import find_native_backend

    extra, folders = _read_flags(request).backends, backend_folders_of(request)
    if extra and extra not in folders:
        message = f"--backend-directory {extra} is not a folder"
        yield Finding(subject="backends", level=Level.ERROR, message=message, hint="name a folder of backends")
    found = {
        path.name for folder in folders for path in folder.glob("*") if (path / f"libtriton_{path.name}.so").exists()
    }
    names = sorted(found - {"python"})
    native = find_native_backend(folders)
    version = native.version if native else ""
    shown = [f"{name} (ONNX Runtime {version})" if name == "onnxruntime" and version else name for name in names]
    yield Finding(
        subject="C++ backends",
        message=", ".join(shown) or "none, so graphkiln computes all models",
        facts={"backends": names, "onnxruntime": version},
    )


def check_edge(request: Request) -> Iterator[Finding]:
    """Check HAProxy, which is used if other machines can reach the server."""
    from graphkiln_backend.server.edge import find_haproxy

    program, flags = find_haproxy(), _read_flags(request)
    public = [address.protocol for address in flags.listen_addresses() if address.is_public]
    yield graded(
        "edge",
        str(program or "HAProxy is not installed: tritonserver itself would be public, and TLS is not available"),
        warning=public and program is None,
        hint="apt-get install haproxy",
        program=str(program or ""),
    )


SERVICES = ("http", "grpc", "metrics")


def check_ports(request: Request) -> Iterator[Finding]:
    """Check each port."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.flags import check_distinct, check_free

    taken: list[ListenAddress] = []
    flags = _read_flags(request)
    for service in SERVICES:
        try:
            address = flags.listen_address(service)
        except ServerSetupError as error:
            yield refused(service, error)
            continue
        if address is None:
            yield Finding(subject=service, message="disabled")
            continue
        message, hint, holder = "free", "", ""
        try:
            check_distinct(service, address, taken)
            check_free(service, address)
        except ServerSetupError as error:
            holder = find_holder(address.port)
            message, hint = f"{error.message}{f' by {holder}' if holder else ''}", error.hint
        subject, free = f"{address.protocol} port {address.port}", message == "free"
        yield graded(subject, message, error=not free, hint=hint, port=address.port, free=free, holder=holder)
        taken.append(address)


def _read_flags(request: Request) -> TritonFlags:
    """Parse the user's flags; use defaults if they are invalid, which `check_triton` reports."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.flags import DEFAULT_HOST, TritonFlags
    from graphkiln_backend.server.installation import find_installation

    host = request.host or DEFAULT_HOST
    with suppress(ServerSetupError):
        return TritonFlags.parse(request.arguments, find_installation().flags, host)
    return TritonFlags.parse((), {}, host)


def find_holder(port: int) -> str:
    """Return the program that listens on a port, or "" if it is unknown to this user."""
    import psutil

    with suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            listens = connection.status == psutil.CONN_LISTEN and connection.laddr and connection.laddr.port == port
            if listens and connection.pid:
                return f"{psutil.Process(connection.pid).name()} (process {connection.pid})"
    return ""
