"""Asks a running server how it is, over HTTP, with the standard library."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.triton.instance_status import InstanceStatus, read_statuses

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


def model_states(http_endpoint: ListenAddress, instances: Path) -> list[ModelState]:
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
        for row in json.loads(_post(http_endpoint, "/v2/repository/index"))
    ]


def _post(endpoint: ListenAddress, path: str) -> bytes:
    connection = http.client.HTTPConnection(*endpoint.local_address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, headers={"Connection": "close"})
        return connection.getresponse().read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"port {endpoint.port} broke off its answer: {error}") from error
    finally:
        connection.close()
