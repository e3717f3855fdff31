"""The tritonserver that would be started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from graphkiln.doctor.finding import Finding, Level, Request
from graphkiln.doctor.packages import installed_versions

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
