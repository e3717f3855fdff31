"""Packages that serving needs: Python, the distributions, the tritonserver that would be started."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution

from graphkiln.doctor.finding import Finding, Level, Request, graded, refused

_OWN = "graphkiln"
_SERVING = "serve"
_WHEEL = "nvidia-pytriton"
SHOWN = (_OWN, "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "openvino", _WHEEL, "tritonclient")
# Distributions with the same files: of two, the last that was installed wins, silently.
_EXCLUSIVE = (("onnxruntime", "onnxruntime-gpu"),)


def check_packages(_: Request) -> Iterator[Finding]:
    """Python, versions, conflicts."""
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
    """Versions of those distributions that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = distribution(name).version
        except PackageNotFoundError:
            continue
    return found


def find_conflicts(versions: Mapping[str, str]) -> Iterator[Finding]:
    """Distributions that may not be installed together."""
    for names in _EXCLUSIVE:
        if all(name in versions for name in names):
            yield Finding(
                subject=" and ".join(names),
                level=Level.WARNING,
                message="overwrite each other: which one is imported is chance",
                hint=f"pip uninstall {' '.join(names)}, then install the one that you want",
            )


def find_unmet(name: str, extra: str = "") -> Iterator[Finding]:
    """Unmet requirements of a distribution, and of one of its extras."""
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
            continue  # a Triton container has its own server, which `check_triton` looks for
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
    """The tritonserver: there, starting, knowing the flags; its known vulnerabilities."""
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
