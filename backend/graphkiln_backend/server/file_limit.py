"""How many files a server may have open: each connection is one, and Triton (24.10) waits for more without an end."""

from __future__ import annotations

import resource

from graphkiln_backend.graph.errors import ServerSetupError

_LEAST = 256
"""What a server of a few models has open, and some connections."""
_OF_INSTANCE = 3
"""In tritonserver, as counted with 16 instances."""
_ENOUGH = 65_536


def raise_file_limit() -> None:
    """Allows this process and its children as many open files as the system's own limit allows, within reason.

    Raises:
        ServerSetupError: That is too few.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    most = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if most > soft:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    _require(_LEAST, max(most, soft), "a server needs")


def check_files(instances: int) -> None:
    """Refuses what would end in the middle of a start.

    Args:
        instances: Of all models.

    Raises:
        ServerSetupError: They need more open files than this process may have, once its limit is raised.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY not in {soft, hard}:
        _require(_LEAST + instances * _OF_INSTANCE, hard, f"a server of {instances} model instances needs")


def _require(needed: int, allowed: int, who: str) -> None:
    if allowed < needed:
        enough = max(4096, 2 * needed)
        raise ServerSetupError(
            f"no more than {allowed} files may be open at once: {who} {needed}, and one for each connection",
            hint=f"ulimit -n {enough}; in a container: docker run --ulimit nofile={enough}:{enough}",
        )
