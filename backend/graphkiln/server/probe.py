"""Asks a running server how it is, over HTTP, with the standard library."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graphkiln.server.flags import Endpoint
from graphkiln.triton.instance_status import InstanceStatus, read_statuses

_TIMEOUT_S = 2.0


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """One row of what the server serves.

    Attributes:
        model: Model name.
        version: Model version.
        state: Triton's state: `READY`, `UNAVAILABLE`, ...
        reason: Triton's reason for a state other than READY.
        status: What our backend's slowest instance reported; None for models of other backends.
    """

    model: str
    version: str
    state: str
    reason: str
    status: InstanceStatus | None


def is_live(http_endpoint: Endpoint) -> bool:
    """Whether the server answers requests; models may still be missing."""
    return _status(http_endpoint, "/v2/health/live") == 200


def model_states(http_endpoint: Endpoint, instances: Path) -> list[ModelState]:
    """Every model version that the server knows, with our backend's status.

    Raises:
        OSError: The server does not answer.
    """
    slowest = {(s.model, str(s.version)): s for s in sorted(read_statuses(instances), key=lambda s: s.load_ms)}
    return [
        ModelState(
            model=row["name"],
            version=row.get("version", ""),
            state=row.get("state", "UNLOADED"),
            reason=row.get("reason", ""),
            status=slowest.get((row["name"], row.get("version", ""))),
        )
        for row in json.loads(_request(http_endpoint, "POST", "/v2/repository/index")[1])
    ]


def _status(endpoint: Endpoint, path: str) -> int | None:
    try:
        return _request(endpoint, "GET", path)[0]
    except (OSError, http.client.HTTPException):
        return None


def _request(endpoint: Endpoint, method: str, path: str) -> tuple[int, Any]:
    connection = http.client.HTTPConnection(*endpoint.local_address, timeout=_TIMEOUT_S)
    try:
        connection.request(method, path, headers={"Connection": "close"})
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()
