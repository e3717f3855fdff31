"""States of all model versions of a server: loading progress during the start, then what it serves.

Triton (24.10) only reports "not healthy" if the process of a failed version died; the instance's status files contain
the cause.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from graphkiln_backend.graph.text import plain_reason
from graphkiln_backend.repository.model_config import GPU_HINT
from graphkiln_backend.server.proofs import ProofState
from graphkiln_backend.server.repository_control import RepositoryControl, VersionState
from graphkiln_backend.system.processes import is_gone
from graphkiln_backend.triton.instance_status import Crash, InstanceStatus, describe_crash
from graphkiln_backend.triton.snapshot import Snapshot, read_snapshot

_log = logging.getLogger("graphkiln.server")

READY = "ready"
REFUSED = "REFUSED"  # state of a version that is not shown to the server
_UNLOADED = {("UNAVAILABLE", "unloaded"), ("UNLOADING", ""), ("UNLOADED", "")}  # state and reason
_NO_GPU = "KIND_GPU but no GPUs are available"
_UNHEALTHY = re.compile(r"Stub process '[^']*' is not healthy\.?|Stub process is not healthy\.?")


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadProgress:
    """A loading or ready version.

    Attributes:
        model: Model name.
        version: Version number.
        activity: Present step of its slowest instance; `ready` once all are ready.
        seconds: Loading time so far, or in total.
    """

    model: str
    version: int
    activity: str
    seconds: float

    @property
    def is_ready(self) -> bool:
        """True if every instance is ready."""
        return self.activity == READY


def load_progress(seen: Snapshot) -> list[LoadProgress]:
    """List the loading and ready versions, sorted by name and number."""
    now = time.monotonic()
    crashes = _find_crashes(seen)
    rows = [
        *(
            LoadProgress(model=s.model, version=s.version, activity=READY, seconds=s.load_ms / 1e3)
            for s in sorted(seen.statuses.values(), key=lambda status: status.load_ms)
        ),
        *(
            LoadProgress(model=s.model, version=s.version, activity=s.activity, seconds=now - s.since)
            for s in sorted(seen.loading.values(), key=lambda loading: -loading.since)
        ),
    ]
    slowest = {(row.model, row.version): row for row in rows}
    for which, crash in crashes.items():
        if which in slowest and not slowest[which].is_ready:
            slowest[which] = replace(slowest[which], activity=crash.what)
    return [slowest[key] for key in sorted(slowest)]


def _find_crashes(seen: Snapshot) -> dict[tuple[str, int], Crash]:
    """Find the newest crash of a loading process for each model and version."""
    newest = sorted(seen.loading.items(), key=lambda item: item[1].since)
    latest = {(loading.model, loading.version): (key, loading) for key, loading in newest if is_gone(loading.pid)}
    return {which: describe_crash(loading, seen.crashes.get(key, "")) for which, (key, loading) in latest.items()}


def explain(rows: Sequence[VersionState], instances: Path) -> list[VersionState]:
    """Replace "not healthy" in Triton's reasons by the cause of the crash, and name the remedy of a missing GPU."""
    rows = [replace(row, reason=f"{row.reason} ({GPU_HINT})") if row.reason.endswith(_NO_GPU) else row for row in rows]
    if not any(_UNHEALTHY.search(row.reason) for row in rows):
        return rows
    crashes = _find_crashes(read_snapshot(instances))

    def reason(row: VersionState) -> str:
        crash = crashes.get((row.model, int(row.version))) if row.version else None
        return _UNHEALTHY.sub(lambda _: str(crash), row.reason) if crash else row.reason

    return [replace(row, reason=reason(row)) for row in rows]


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelState:
    """A model version in the server's list.

    Attributes:
        model: Model name.
        version: Model version.
        state: Triton's state: `READY`, `UNAVAILABLE`, ...; or `REFUSED`.
        reason: Triton's reason for a state other than READY.
        status: Status of its slowest instance; None for other backends and the native seat.
        proof: Proof through the server, if no instance of graphkiln computes it; else None.
    """

    model: str
    version: str
    state: str
    reason: str
    status: InstanceStatus | None
    proof: ProofState | None = None

    @property
    def is_refused(self) -> bool:
        """True if graphkiln does not show it to the server; the reason was logged then."""
        return self.state == REFUSED


def list_models(
    control: RepositoryControl | None,
    instances: Path,
    refusals: Mapping[tuple[str, str], str],
    proofs: Sequence[ProofState] = (),
) -> list[ModelState]:
    """List all known and refused versions, except deliberately unloaded ones.

    If the server cannot list its models, the versions with ready instances are listed.

    Args:
        control: Repository control of the server, or None.
        instances: Folder of status files.
        refusals: Reasons of refused versions, by model and version.
        proofs: Proofs through the server.
    """
    proven = {(proof.model, str(proof.version)): proof for proof in proofs}
    statuses = sorted(read_snapshot(instances).statuses.values(), key=lambda status: status.load_ms)
    slowest = {(status.model, str(status.version)): status for status in statuses}
    rows = [VersionState(model=model, version=version, state="READY", reason="") for model, version in slowest]
    if control:
        try:
            rows = explain(control.index(), instances)
        except OSError as error:  # the user's --http-restricted-api, or a server that has just exited
            _log.warning("the server does not list its models: %s", error)
    listed = [
        ModelState(
            model=row.model,
            version=row.version,
            state=row.state,
            reason=plain_reason(row.reason),
            status=slowest.get((row.model, row.version)),
            proof=proven.get((row.model, row.version)),
        )
        for row in rows
        if (row.model, row.version) not in refusals and (row.state, row.reason) not in _UNLOADED
    ]
    refused = [
        ModelState(model=model, version=version, state=REFUSED, reason=plain_reason(reason), status=None)
        for (model, version), reason in refusals.items()
    ]
    return sorted([*listed, *refused], key=lambda state: (state.model, state.version.zfill(20)))
