"""The models of a running server: the versions that it lists, with what their instances reported."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.graph.text import plain_reason
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.load_progress import ExplainingControl
from graphkiln_backend.server.repository_control import HttpControl, RepositoryControl
from graphkiln_backend.triton.instance_status import InstanceStatus
from graphkiln_backend.triton.snapshot import read_snapshot

_log = logging.getLogger("graphkiln.server")

_PASSED = {("UNAVAILABLE", "unloaded"), ("UNLOADING", ""), ("UNLOADED", "")}
REFUSED = "REFUSED"  # state of a version that is kept away from the server


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


def model_states(control: RepositoryControl, instances: Path) -> list[ModelState]:
    """Every model version that the server knows.

    Args:
        control: The running server.
        instances: Folder of status files.

    Raises:
        OSError: The server does not list its models.
    """
    slowest = _slowest_instances(instances)
    return [
        ModelState(
            model=row.model,
            version=row.version,
            state=row.state,
            reason=plain_reason(row.reason),
            status=slowest.get((row.model, row.version)),
        )
        for row in control.index()
    ]


def list_models(address: ListenAddress | None, headers: Mapping[str, str], instances: Path) -> list[ModelState]:
    """Every model version that the server knows; those whose instances are ready, where it does not list its models.

    Args:
        address: Where it listens for HTTP, if it does.
        headers: What its restricted endpoints need.
        instances: Folder of status files.
    """
    if address:
        try:
            return model_states(ExplainingControl(HttpControl(address, headers), instances), instances)
        except OSError as error:  # the user's own --http-restricted-api, or a server that ends at once
            _log.warning("the server does not list its models: %s", error)
    return states_of_instances(instances)


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
    """Add the versions that are not served and why; leave out those that were unloaded on purpose.

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
    statuses = sorted(read_snapshot(instances).statuses.values(), key=lambda status: status.load_ms)
    return {(status.model, str(status.version)): status for status in statuses}
