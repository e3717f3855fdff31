"""Python and the packages that serving needs: which are there, and whether they fit together."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request

# The tritonserver that would be started.

_WHEEL = "nvidia-pytriton"
_WHEEL_RELEASES = {"0.7.0": "2.51.0"}  # version of the wheel -> of the server in it, which says it nowhere


def check_triton(request: Request) -> Iterator[Finding]:
    """Whether there is one, whether it starts, and whether it knows the flags."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.flags import TritonFlags
    from graphkiln_backend.server.installation import find_installation

    try:
        installation = find_installation()
        flags = installation.flags
        TritonFlags.parse(request.arguments, flags)
    except ServerSetupError as error:
        yield Finding(subject="tritonserver", level=Level.ERROR, message=error.message, hint=error.hint)
        return
    version = read_version(installation.binary)
    yield Finding(
        subject="tritonserver",
        message=f"{version or 'unknown version'}, {len(flags)} flags, {installation.binary}",
        facts={"version": version, "binary": str(installation.binary), "flags": len(flags)},
    )


def read_version(binary: Path) -> str:
    """The server's version, or empty where it is not known.

    Args:
        binary: The program: of a Triton container, or in the wheel.
    """
    file = binary.parent.parent / "TRITON_VERSION"
    if file.is_file():
        return file.read_text().strip()
    wheel = installed_versions([_WHEEL]).get(_WHEEL, "") if "pytriton" in binary.parts else ""
    return f"{_WHEEL_RELEASES.get(wheel, 'unknown')} of {_WHEEL} {wheel}" if wheel else ""


_OWN = "graphkiln"
_SERVING = "serve"
# A Triton container needs no other tritonserver; whether there is one is a check of its own.
_TRITON = "nvidia-pytriton"
SHOWN = (_OWN, "numpy", "onnx", "onnxruntime", "onnxruntime-gpu", "openvino", _TRITON, "tritonclient")
# Distributions with the same files: of two, the last that was installed wins, silently.
_EXCLUSIVE = (("onnxruntime", "onnxruntime-gpu"),)


def check_packages(_: Request) -> Iterator[Finding]:
    """Python, versions, conflicts."""
    versions = installed_versions(SHOWN)
    yield Finding(
        subject="Python",
        message=f"{platform.python_implementation()} {platform.python_version()}",
        facts={"version": platform.python_version()},
    )
    yield Finding(
        subject="versions",
        message=", ".join(f"{name} {version}" for name, version in versions.items()) or "none is installed",
        facts=dict(versions),
    )
    yield from find_conflicts(versions)
    yield from find_unmet(_OWN, _SERVING)
    for name in versions:
        if name != _OWN:
            yield from find_unmet(name)


def installed_versions(names: Sequence[str]) -> dict[str, str]:
    """The versions of those distributions that are installed."""
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
    """The requirements of a distribution that are not met.

    Args:
        name: The distribution.
        extra: Also its requirements for this extra.
    """
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
        if found is None and (requirement.name == _TRITON or _is_replaced(requirement.name)):
            continue
        if found is None or not requirement.specifier.contains(found, prereleases=True):
            missing = found is None and name == _OWN
            yield Finding(
                subject=name,
                level=Level.ERROR if missing else Level.WARNING,
                message=f"needs {requirement.name}{requirement.specifier}, found {found or 'none'}",
                hint=f"pip install '{requirement.name}{requirement.specifier}'",
                facts={"requirement": str(requirement), "found": found},
            )


def _is_replaced(name: str) -> bool:
    """Whether another distribution with the same files is installed."""
    others = {other for names in _EXCLUSIVE if name in names for other in names}
    return bool(installed_versions(sorted(others)))
