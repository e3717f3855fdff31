"""A run from Python or from the command: mistakes first, then the run, then its record."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from graphkiln.scoring import check_extra

if TYPE_CHECKING:
    from graphkiln.scoring.options import ScoreOptions
    from graphkiln.scoring.record import RunRecord
    from graphkiln.scoring.run_state import Progress, RunState
    from graphkiln_backend.scoring.destinations.base import Destination
    from graphkiln_backend.scoring.destinations.lock import Lock
    from graphkiln_backend.scoring.request import ScoreRequest
    from graphkiln_backend.scoring.verify import Verification

Observer = Callable[["Progress"], None]


def score(
    source: str | Path,
    *,
    model: str | Path,
    out: str | Path,
    observe: Observer | None = None,
    **options: Unpack[ScoreOptions],
) -> RunRecord:
    """Score a data set: every row of the source gets an answer or an error in the destination, exactly once.

    Called again with the same arguments it goes on where it was interrupted.

    Args:
        source: Folder or pattern of images, listing, Parquet, tars, or a query; of this machine or of a store.
        model: `STORE/NAME`, `STORE/NAME:VERSION` or `STORE/NAME/VERSION`; also in a remote store.
        out: Folder, store or database for the answers.
        observe: Called with how far the run is, whenever something happened.
        options: As `ScoreOptions` has them.

    Returns:
        What `_run.json` says of the run.

    Raises:
        GraphkilnError: A mistake in the request, or the run cannot be finished; the same call goes on.
    """
    check_extra()
    from graphkiln.scoring.options import build_request

    return run_request(build_request(source, model, out, options), observe)


def verify(out: str | Path, *, format: str = "", ledger: str = "") -> Verification:  # noqa: A002  as the command calls it
    """Compare a destination with the plan that its last run left there.

    Args:
        out: The destination.
        format: `parquet` or `delta`; empty for what the destination says.
        ledger: Postgres database that remembers commits, where the run was given one.

    Returns:
        The counts, and what is wrong.

    Raises:
        ScoringError: There is no such destination, no run has finished its plan there, or it cannot be read.
    """
    check_extra()
    from graphkiln.scoring.options import absolute
    from graphkiln_backend.scoring.errors import ScoringError
    from graphkiln_backend.scoring.opening import open_destination
    from graphkiln_backend.scoring.plan import PLAN, read_plan
    from graphkiln_backend.scoring.request import ScoreRequest
    from graphkiln_backend.scoring.scratch import Scratch, scratch_folder
    from graphkiln_backend.scoring.verify import verify as compare

    place = absolute(str(out))
    request = ScoreRequest(source="", model="", destination=place, format=format, ledger=ledger)
    destination = open_destination(request)
    with scratch_folder(Scratch.PLAN) as folder:
        plan = folder.path / PLAN
        if not destination.notes.fetch(PLAN, plan):
            raise ScoringError(f"{out} holds no plan of graphkiln score", hint="name the --out of a run")
        return compare(destination, read_plan(plan), spill=folder.path)


def run_request(request: ScoreRequest, observe: Observer | None = None) -> RunRecord:
    """Run a request; as `score`.

    Raises:
        GraphkilnError: As of `score`.
    """
    from graphkiln.scoring.metrics import RunMetrics
    from graphkiln.scoring.mistakes import check_places, check_source
    from graphkiln.scoring.run_state import RunState
    from graphkiln_backend.scoring.driver import score_data_set
    from graphkiln_backend.scoring.messages import Event
    from graphkiln_backend.scoring.model import with_version

    check_places(request)
    check_source(request)
    # Before the driver, which pins the version for its workers but keeps it to itself: the record names it, too.
    request = with_version(request)
    state, metrics = RunState(), RunMetrics()

    def report(event: Event) -> None:
        metrics.observe(event)
        progress = state.observe(event)
        if observe:
            observe(progress)

    notes = _Notes(request, state)
    score_data_set(request, report, notes.write)
    return notes.record


class _Notes:
    """The notes of a run, which it leaves beside its results: the rows with an error, and its record."""

    def __init__(self, request: ScoreRequest, state: RunState) -> None:
        self._request, self._state, self._begun = request, state, datetime.now(UTC)
        self.record: RunRecord

    def write(self, destination: Destination, lock: Lock, error: BaseException | None) -> None:
        """Write both; of a run that failed the record alone, and nothing where it planned nothing.

        Raises:
            ScoringError: One of them cannot be written. It is added to what the run failed for, where it did.
        """
        failure = error or self._collect_errors(destination, lock)
        self._write_record(destination, failure)
        if failure is not error:
            raise failure  # type: ignore[misc]  # not None, as the error is None

    def _collect_errors(self, destination: Destination, lock: Lock) -> BaseException | None:
        """Write `_errors.parquet` where this run committed anything, or where the last one did not come to it."""
        from graphkiln.scoring.record import ERRORS, collect_errors

        try:
            if self._state.units or destination.notes.read(ERRORS) is None:
                collect_errors(destination, destination.committed_ids(), lock.check)
        except BaseException as failure:  # noqa: BLE001 - raised once the record says so
            return failure
        return None

    def _write_record(self, destination: Destination, error: BaseException | None) -> None:
        from graphkiln.scoring.record import NOTE, describe_run, write_record
        from graphkiln_backend.graph.errors import GraphkilnError

        self.record = describe_run(self._request, self._state, self._begun, error)
        if self._state.plan is None:
            return
        try:
            write_record(self.record, destination)
        except (GraphkilnError, OSError) as failure:
            if error is None:
                raise
            error.add_note(f"nor could {NOTE} be written: {failure}")
