"""Restarts of the server by cause: written by the supervisor, which has no metrics port, and published by an instance.

`triton.metrics` reads the file; exactly one instance publishes the counts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from graphkiln_backend.triton.instance_status import write_whole

RESTARTS_FILE = "restarts.json"  # cause -> restarts since the supervisor started, in the folder of status files


def write_restarts(folder: Path, counts: Mapping[str, int]) -> None:
    """Write the restarts by cause.

    Raises:
        OSError: The file cannot be written.
    """
    write_whole(folder / RESTARTS_FILE, json.dumps(counts).encode())


def read_restarts(folder: Path) -> dict[str, int]:
    """Read the restarts by cause; empty if the file is missing or truncated."""
    try:
        counts: dict[str, int] = json.loads((folder / RESTARTS_FILE).read_bytes())
    except (OSError, ValueError):
        return {}
    return counts
