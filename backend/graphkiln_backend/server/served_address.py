"""Where a server listens, told in its run's folder: the health check of an image finds the one that runs beside it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.system.owned_folder import OTHER_PARENTS, locked_if_dead, owned_folders

_FILE = "address.json"


def publish_address(folder: Path, flags: TritonFlags) -> None:
    """Tells where a server listens: for HTTP, or else for gRPC.

    Args:
        folder: Of its run.
        flags: tritonserver's own, behind TLS if there is any.

    Raises:
        OSError: The file cannot be written.
    """
    for protocol in ("http", "grpc"):
        if address := flags.listen_address(protocol):
            (folder / _FILE).write_text(json.dumps([protocol, *address.local_address]) + "\n")
            return


def served_addresses(parents: Iterable[Path] | None = None) -> Iterator[tuple[str, str, int]]:
    """Protocol, host and port of each server of this user that runs on this machine.

    Args:
        parents: Where run folders are; None for all places.
    """
    for parent in parents or sorted({Path(tempfile.gettempdir()), *OTHER_PARENTS}):
        for run in owned_folders(parent):
            with suppress(OSError, ValueError):
                protocol, host, port = json.loads((run / _FILE).read_text())
                if _lives(run):
                    yield str(protocol), str(host), int(port)


def _lives(run: Path) -> bool:
    with locked_if_dead(run) as dead:
        return not dead
