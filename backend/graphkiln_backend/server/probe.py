"""Asks a running server for the state of its models, over HTTP, with the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from graphkiln_backend.graph.error_text import plain_reason
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.triton.instance_status import InstanceStatus, read_statuses

_TIMEOUT_S = 2.0
_PASSED = {("UNAVAILABLE", "unloaded"), ("UNLOADING", ""), ("UNLOADED", "")}
REFUSED = "REFUSED"
"""State of a version that is kept away from the server."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """A model version as the server lists it.

    Attributes:
        model: Model name.
        version: Model version.
        state: Triton's state: `READY`, `UNAVAILABLE`, ...
        reason: Triton's reason for a state other than READY.
        status: What its slowest instance reported; None for models of other backends.
    """

    model: str
    version: str
    state: str
    reason: str
    status: InstanceStatus | None


def model_states(
    address: ListenAddress, instances: Path, headers: Mapping[str, str] = MappingProxyType({})
) -> list[ModelState]:
    """Every model version that the server knows.

    Args:
        address: Where it listens for HTTP.
        instances: Folder of status files.
        headers: What the request must carry (`Access.http_headers`).

    Raises:
        OSError: The server does not list its models.
    """
    slowest = _slowest_instances(instances)
    return [
        ModelState(
            model=row["name"],
            version=row.get("version", ""),
            state=row.get("state", "UNLOADED"),
            reason=plain_reason(row.get("reason", "")),
            status=slowest.get((row["name"], row.get("version", ""))),
        )
        for row in json.loads(_post(address, "/v2/repository/index", headers))
    ]


def states_of_instances(instances: Path) -> list[ModelState]:
    """The model versions whose instances are ready, for a server that does not list its models.

    Args:
        instances: Folder of status files.
    """
    return [
        ModelState(model=model, version=version, state="READY", reason="", status=status)
        for (model, version), status in _slowest_instances(instances).items()
    ]


def with_refusals(states: Sequence[ModelState], refusals: Mapping[tuple[str, str], str]) -> list[ModelState]:
    """The states, with the versions that are not served and why; without those that were unloaded on purpose.

    Args:
        states: As the server lists them.
        refusals: By model and version.
    """
    kept = [
        state
        for state in states
        if (state.model, state.version) not in refusals and (state.state, state.reason) not in _PASSED
    ]
    refused = [
        ModelState(model=model, version=version, state=REFUSED, reason=plain_reason(reason), status=None)
        for (model, version), reason in refusals.items()
    ]
    states = [*kept, *refused]
    return sorted(states, key=lambda state: (state.model, state.version.zfill(20))) if refused else states


def _slowest_instances(instances: Path) -> dict[tuple[str, str], InstanceStatus]:
    """By model and version."""
    statuses = sorted(read_statuses(instances), key=lambda status: status.load_ms)
    return {(status.model, str(status.version)): status for status in statuses}


def _post(address: ListenAddress, path: str, headers: Mapping[str, str]) -> bytes:
    connection = http.client.HTTPConnection(*address.local_address, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", path, headers={**headers, "Connection": "close"})
        response = connection.getresponse()
        body = response.read()
    except http.client.HTTPException as error:
        raise ConnectionError(f"port {address.port} broke off its response: {error}") from error
    finally:
        connection.close()
    if response.status != http.HTTPStatus.OK:
        raise ConnectionError(f"port {address.port} responded with status {response.status} to {path}")
    return body
