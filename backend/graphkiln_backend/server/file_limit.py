"""How many files a server may have open: each connection is one, and Triton (24.10) waits for more without an end."""

from __future__ import annotations

import resource

from graphkiln_backend.graph.errors import ServerSetupError

_LEAST = 256
"""What a server of a few models has open, and some connections."""
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
    if max(most, soft) < _LEAST:
        raise ServerSetupError(
            f"no more than {most} files may be open at once: a server needs {_LEAST}, and one for each connection",
            hint="ulimit -n 4096; in a container: docker run --ulimit nofile=4096:4096",
        )
