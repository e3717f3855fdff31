"""Carry out the rollouts of a running server: show the candidate, compare it, promote it or take it back.

The candidate of a model NAME is loaded as the model `NAME.candidate` with one instance; NAME goes on with its other
versions, in Python instances. They learn by a file what to do (`triton.rollout_files`), and count; this controller adds
the counts up once a second, asks the gates, and takes the next step if they decide.

    asked for            what is done
    shadow               NAME without the candidate; the candidate is proven and loaded; then NAME's instances are told
    traffic              the same, and the candidate leaves the idle cores: it is loaded again
    promoted             NAME is loaded with the candidate, without a gap; then NAME.candidate is unloaded
    aborted              NAME's instances are told; then NAME.candidate is unloaded

A step that was interrupted is repeated by the next run of the server, whose start serves NAME as asked for.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.contract import CONTRACTS, Contracts
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.repository.agreement import find_disagreement
from graphkiln_backend.repository.config import ModelConfigProto, read_config, select_versions
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.server.rollouts import Progress, RolloutError, RolloutFolder, Wanted, digest_files, rolled_back
from graphkiln_backend.server.watchdog import StarvationDetector, core_use
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.signals import ServerStopping
from graphkiln_backend.triton.rollout_files import (
    Assignment,
    Tally,
    assignment_path,
    candidate_name,
    read_tallies,
    tried_model,
    write_file,
)
from graphkiln_backend.triton.snapshot import read_snapshot

if TYPE_CHECKING:
    from graphkiln_backend.server.admission import Verdict

_log = logging.getLogger("graphkiln.server")

_LOOK_S = 0.5
_ALIVE_S = 5.0  # between two signs of life without news
_TOLD_S = 2.5  # until every instance has read its assignment, and finished what it sent
_SHADOW_IN_TRAFFIC = 0.05  # share of the requests that are still compared
# What ends a rollout without gates, too: failures in a row, or a share of failures, or no answer for so long.
_MOST_IN_A_ROW = 5
_FEWEST_FAILURES, _MOST_FAILING = 10, 0.5
_SILENT_S = 30.0
# A copy that has taken so much processor time, also in terms of the serving version's p99, will never be answered.
_ENDLESS_S, _ENDLESS_FACTOR = 5.0, 100.0
_FRESH_S = 2.0
# Time limit for an answer to a user: a multiple of the p99 of computing in the slower version, within bounds. Waiting
# for other requests and for a busy machine must not count as a failure.
_DEADLINE_FACTOR = 10.0
_SHORTEST_DEADLINE_S, _USUAL_DEADLINE_S, _LONGEST_DEADLINE_S = 0.5, 2.0, 60.0
_COUNTS = [each.name for each in fields(Tally)]


@dataclass(slots=True)
class _Trial:
    """A loaded candidate.

    Attributes:
        wanted: The change that the instances were told.
        planned: The candidate as Triton has loaded it.
        folder: Folder of the rollout's files.
        progress: As last written.
        before: Counts of earlier runs of the server since the change.
        waiting_s: Time for which it has not answered a copy, when last looked at.
        ran_s: Processor time of its instances when that copy was sent.
    """

    wanted: Wanted
    planned: ShownModel
    folder: RolloutFolder
    progress: Progress
    before: Tally = field(default_factory=Tally)
    waiting_s: float = 0.0
    ran_s: float = 0.0


class RolloutController(Closeable):
    """Carry out rollouts in a thread, until closed.

    Args:
        stores: The models shown to Triton, and their rollouts.
        mirror: The repository that Triton sees.
        control: Repository control of the running server.
        instances: Folder of its status files.
        admit: Proves a version outside of the server.
        refresh: Loads the versions of a model that its rollout allows.
        managed: Whether graphkiln decides which versions serve: the modes none and poll.
        load_timeout_s: Time limit for one load.
        http: HTTP service by which instances ask a candidate; None if there is none, or other servers share its port.
        most_bytes: Size of the largest request that it takes; 0 for any.
    """

    def __init__(
        self,
        *,
        stores: ManagedStores,
        mirror: Mirror,
        control: RepositoryControl,
        instances: Path,
        admit: Callable[[ShownModel, int, Callable[[], bool]], Verdict],
        refresh: Callable[[str], None],
        managed: bool,
        load_timeout_s: float,
        http: ListenAddress | None,
        most_bytes: int = 0,
    ) -> None:
        self._http = http
        self._most_bytes = most_bytes
        self._stores = stores
        self._rollouts = stores.rollouts
        self._mirror = mirror
        self._control = control
        self._instances = instances
        self._admit = admit
        self._refresh = refresh
        self._managed = managed
        self._load_timeout_s = load_timeout_s
        self._trials: dict[str, _Trial] = {}
        self._starvation = StarvationDetector()
        self._pending: set[str] = {*self._rollouts.wanted}  # after a restart all are carried out again
        self._stamps: dict[str, str] = {}  # of candidates that may still be copied
        self._faults: dict[str, str] = {}
        self._unclaimed: set[Path] = set()
        self._unwritten = ""  # the last error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollouts", daemon=True)

    def begin(self) -> None:
        """Begin, once the server is live."""
        self._thread.start()

    def halt(self) -> None:
        """Make no further changes: the server is about to stop."""
        self._stop.set()

    def close(self) -> None:
        """Wait for the thread after the end of the server."""
        self.halt()
        if self._thread.is_alive():
            self._thread.join(10.0)

    def report_fault(self, name: str, what: str, key: str) -> None:
        """End an instance of a candidate that died, hung or computed wrong outputs, and abort its rollout soon.

        Args:
            name: Name of the candidate's model.
            what: Description.
            key: Its `instance.pid`; its status files are removed.
        """
        self._end_instance(key)
        self._faults[tried_model(name)] = what

    def _end_instance(self, key: str) -> None:
        """Kill an instance; requests that wait for it fail, and Triton can unload it."""
        with suppress(ProcessLookupError):
            os.kill(int(key.rpartition(".")[2]), signal.SIGKILL)
        for kind in ("json", "counters", "fault"):
            (self._instances / f"{key}.{kind}").unlink(missing_ok=True)

    def _run(self) -> None:
        reported = ""
        while not self._stop.wait(_LOOK_S):
            try:
                self.step()
            except ServerStopping:
                return
            except Exception as error:  # noqa: BLE001 - keep following the rollouts
                if not self._stop.is_set() and repr(error) != reported:
                    is_known = isinstance(error, OSError | GraphkilnError)
                    _log.error("rollouts, retrying: %s", error, exc_info=None if is_known else error)
                reported = repr(error)

    def step(self) -> None:
        """Carry out changes, and add up what the instances have counted.

        Raises:
            OSError: A file cannot be written, or the server ended: the next step tries again.
        """
        if not self._claim():
            return
        self._pending |= {*self._rollouts.look()}
        for name in sorted(self._pending):
            wanted = self._rollouts.wanted.get(name)
            if wanted is None:
                self._take_back(name)
                done = True
            else:
                done = self._carry_out(wanted)
            if done:
                self._pending.discard(name)
        for name in [*self._faults]:
            what = self._faults.pop(name)
            if name in self._trials:
                self._abort(self._trials[name].wanted, f"the candidate failed: {what}")
        for trial in [*self._trials.values()]:
            if trial.wanted.is_running and trial.wanted.model not in self._pending:
                self._follow(trial)

    def _claim(self) -> bool:
        """Make this server the only one that carries out the rollouts of its stores; return false if another one is."""
        for folder in self._rollouts.folders:
            if fault := folder.claim():
                if folder.path not in self._unclaimed:
                    _log.error("%s: this one serves without them; give it another state folder (--state)", fault)
                self._unclaimed.add(folder.path)
                return False
        return True

    # The four phases.

    def _carry_out(self, wanted: Wanted) -> bool:
        """Carry out a change; return false to try again at the next look."""
        if wanted.is_running:
            return self._try_out(wanted)
        known = self._rollouts.folder_of(wanted.model).read_progress(wanted.model)
        if known and (known.applied_serial, known.phase) == (wanted.serial, wanted.phase):
            return True  # in an earlier run of the server
        if wanted.phase == "promoted":
            return self._promote(wanted)
        self._finish(wanted)
        return True

    def _try_out(self, wanted: Wanted) -> bool:
        name = wanted.model
        trial = self._trials.get(name)
        if trial and trial.wanted.candidate != wanted.candidate:
            self._take_back(name)
            trial = None
        if not trial or trial.wanted.traffic != wanted.traffic:
            try:
                trial = self._scale(trial, wanted) if trial else self._begin(wanted)
            except (GraphkilnError, OSError) as error:
                if self._stop.is_set():  # the server ended
                    raise
                known = isinstance(error, GraphkilnError)  # else the server ended, or a disk is full
                self._abort(wanted, str(error) if known else f"loading the candidate failed: {error}")
                return True
        if trial:
            self._tell(trial, wanted)
        return trial is not None

    def _begin(self, wanted: Wanted) -> _Trial | None:
        """Prove and load a candidate; return None to try again at the next look.

        Raises:
            GraphkilnError, OSError: It cannot be tried; the message says why.
            ServerStopping: The server is stopping.
        """
        name, folder = wanted.model, self._rollouts.folder_of(wanted.model)
        if not self._managed:
            raise RolloutError(
                "in the mode explicit Triton reads the store itself",
                hint="serve with --model-control-mode=none or poll",
            )
        if self._http is None:
            raise RolloutError(
                "instances ask the candidate over HTTP, which is off, or whose port other servers share",
                hint="serve without --allow-http=false and --reuse-http-port=true",
            )
        progress = _read_progress(folder, wanted)
        stored = self._stores.scan().get(name)
        if stored is None or wanted.candidate not in stored.versions:
            self._report(folder, progress, f"waiting for version {wanted.candidate} in the store")
            return None
        stamp = f"{stored.stamp} {stored.versions[wanted.candidate]}"
        before, self._stamps[name] = self._stamps.get(name), stamp
        if before != stamp:  # it may still be copied
            return None
        planned = self._plan(stored, wanted)
        self._report(folder, progress, "the candidate is being proven and loaded")
        try:
            verdict = self._admit(planned, wanted.candidate, self._is_superseded(wanted, progress))
        except ServerStopping:
            if self._stop.is_set():
                raise
            return None
        if reason := verdict.reason or self._load(planned):
            raise RolloutError(f"the candidate is not served: {reason}")
        _log.info("%s: version %d is loaded as %s", name, wanted.candidate, candidate_name(name))
        same = progress.applied_serial == wanted.serial
        counts = Tally(**{key: getattr(progress, key) for key in _COUNTS}) if same else Tally()
        progress.files = digest_files(stored.folder / str(wanted.candidate))
        self._trials[name] = trial = _Trial(
            wanted=wanted, planned=planned, folder=folder, progress=progress, before=counts
        )
        return trial

    def _scale(self, trial: _Trial, wanted: Wanted) -> _Trial:
        """Load as many instances of a candidate as its share of the traffic needs; Triton swaps them without a gap.

        For the first traffic they are new processes, because those of the shadow cannot leave the idle cores.

        Raises:
            GraphkilnError, OSError: They cannot be loaded.
        """
        planned = self._stores.plan_candidate(trial.planned.stored, wanted.candidate, wanted.traffic)
        if planned.config != trial.planned.config:
            if reason := self._load(planned):
                raise RolloutError(f"the candidate is not served: {reason}")
            trial.planned = planned
        return trial

    def _plan(self, stored: StoredModel, wanted: Wanted) -> ShownModel:
        """Plan the candidate, and let the model serve without it.

        Raises:
            RolloutError: There is nothing to compare it with, or it would not fit.
        """
        name, candidate = wanted.model, wanted.candidate
        if fault := stored.problem or stored.faults.get(candidate, ""):
            raise RolloutError(fault)
        if candidate_name(name) in self._stores.shown:
            raise RolloutError(f"a model of the store is named {candidate_name(name)}", hint="rename it")
        planned = self._stores.plan_candidate(stored, candidate, wanted.traffic)
        gone = {*self._rollouts.hidden(name, stored.folder)} - {candidate} | {*rolled_back(wanted, stored.folder)}
        left = [version for version in stored.versions if version not in gone]
        if candidate not in select_versions(read_config(stored.folder / CONFIG_FILE), left):
            raise RolloutError(f"the version_policy of {CONFIG_FILE} would not serve version {candidate}")
        self._refresh(name)
        shown = self._stores.shown.get(name)
        if shown is None or not shown.versions or candidate in shown.versions:
            raise RolloutError("no other version of the model serves", hint="add the version to compare with")
        if wanted.serving not in shown.versions:
            serving = ", ".join(map(str, shown.versions))
            raise RolloutError(f"version {wanted.serving} does not serve, but {serving}", hint="name that one")
        if shown.native is not None:
            raise RolloutError("seat: native is set, and Triton's C++ backend cannot compare", hint="remove it")
        if shown.config is None or planned.config is None:
            raise RolloutError("only models of graphkiln's own backend can be compared")
        if problem := find_disagreement(planned.config, shown.config):
            raise RolloutError(f"its signature is not that of the serving version: {problem}")
        _check_contract(planned.config, wanted)
        return planned

    def _load(self, planned: ShownModel) -> str:
        """Load a candidate; return why it failed, or an empty text."""
        stored, version = planned.stored, planned.versions[0]
        name = candidate_name(stored.name)
        if planned.config is None:
            return "its configuration is not complete"
        self._mirror.show_candidate(name, stored.folder, version, planned.config)
        error = self._control.load(name, self._load_timeout_s)
        serves = any(row.model == name and row.state == "READY" for row in self._control.index())
        if error or not serves:
            self._unload(name)
            return error or "it could not be loaded"
        return ""

    def _promote(self, wanted: Wanted) -> bool:
        name = wanted.model
        stored, known = self._stores.scan().get(name), self._rollouts.folder_of(name).read_progress(name)
        tried = known.files if known and known.candidate == wanted.candidate else ""
        if stored and tried and tried != digest_files(stored.folder / str(wanted.candidate)):
            self._abort(wanted, "the candidate's files changed during the rollout")
            return True
        if self._managed:
            self._refresh(name)
        shown = self._stores.shown.get(name)
        if shown is None or wanted.candidate not in shown.versions:
            reason = self._stores.reasons(stored).get(wanted.candidate, "") if stored else ""
            self._abort(wanted, f"the candidate could not be promoted: {reason or 'it is not in the store'}")
            return True
        self._finish(wanted)
        _log.info("%s: version %d is promoted%s", name, wanted.candidate, wanted.reason and f": {wanted.reason}")
        return True

    def _abort(self, wanted: Wanted, reason: str) -> None:
        """End a rollout for a reason, unless the user has changed it meanwhile."""
        folder = self._rollouts.folder_of(wanted.model)
        aborted = wanted.changed("aborted", reason=reason)
        try:
            folder.write_wanted(aborted)
        except RolloutError:  # the next look carries out the user's change
            return
        except OSError as error:  # users come first: it is written by the next look that can
            _log.error("%s: the end of its rollout cannot be written: %s", wanted.model, error)
            self._pending.add(wanted.model)
        self._rollouts.wanted[wanted.model] = aborted
        _log.error("%s: the rollout of version %d is aborted: %s", wanted.model, wanted.candidate, reason)
        self._finish(aborted)

    def _finish(self, wanted: Wanted) -> None:
        """End a rollout: take the candidate back, and write the last counts."""
        name, folder = wanted.model, self._rollouts.folder_of(wanted.model)
        trial = self._trials.get(name)
        self._take_back(name)
        if trial:
            self._add_up(trial)
        progress = trial.progress if trial else None
        if progress is None or progress.candidate != wanted.candidate:
            progress = _read_progress(folder, wanted)
        if wanted.serial > (folder.read_wanted(name) or wanted).serial:  # the disk was full
            folder.write_wanted(wanted)
        progress.aborted.pop(str(wanted.candidate), None)
        if wanted.phase == "aborted" and (stored := self._stores.scan().get(name)):  # until they change
            progress.files = digest_files(stored.folder / str(wanted.candidate))
            progress.aborted[str(wanted.candidate)] = progress.files
        if wanted.phase == "promoted" and (stored := self._stores.scan().get(name)):  # also during later rollouts
            replaced = rolled_back(wanted, stored.folder)
            progress.aborted |= {str(each): digest_files(stored.folder / str(each)) for each in replaced}
        progress.phase, progress.share, progress.reason = wanted.phase, 0.0, wanted.reason
        progress.applied_serial, progress.updated_at = wanted.serial, time.time()
        if self._managed and wanted.phase == "aborted":
            self._refresh(name)  # the seat may be the native one again
        folder.write_progress(progress)

    def _take_back(self, name: str) -> None:
        """Tell the instances of a model that its rollout is over, then unload the candidate."""
        path = assignment_path(self._instances, name)
        told = path.exists()
        path.unlink(missing_ok=True)
        trial = self._trials.pop(name, None)
        self._stamps.pop(name, None)
        if trial or (self._mirror.path / candidate_name(name)).exists():
            if told:
                self._stop.wait(_TOLD_S)
            self._unload(candidate_name(name))

    def _unload(self, name: str) -> None:
        """Unload a candidate that gets no requests any more; one that still computes would never end."""
        seen = read_snapshot(self._instances)
        for key, status in seen.statuses.items():
            if status.model == name and key in seen.progress and seen.progress[key].computing:
                self._end_instance(key)
        try:
            self._control.unload(name)
        except OSError as error:
            _log.warning("%s: %s", name, error)
        self._mirror.remove(name)

    # While a candidate is tried.

    def _tell(self, trial: _Trial, wanted: Wanted) -> None:
        """Tell the instances of a model and of its candidate what to do."""
        progress, name = trial.progress, wanted.model
        # In shadow the candidate's latency is that of idle cores, which no user will meet.
        candidate_s = progress.candidate_latency.p99 if progress.phase == "traffic" else 0.0
        slowest_s = max(candidate_s, progress.serving_latency.p99)
        deadline_s = _DEADLINE_FACTOR * slowest_s or _USUAL_DEADLINE_S
        if progress.applied_serial != wanted.serial:
            trial.before = Tally()
        trial.wanted = wanted
        in_traffic = wanted.phase == "traffic"
        assert self._http is not None  # noqa: S101 - checked before the candidate was loaded
        host, port = self._http.local_address
        assignment = Assignment(
            serial=wanted.serial,
            candidate=wanted.candidate,
            compared=min(_SHADOW_IN_TRAFFIC, 1 - wanted.share) if in_traffic else wanted.share,
            answered=wanted.traffic,
            deadline_s=min(max(deadline_s, _SHORTEST_DEADLINE_S), _LONGEST_DEADLINE_S),
            host=host,
            port=port,
            headers={**self._control.headers},
            most_bytes=self._most_bytes,
        )
        write_file(assignment_path(self._instances, name), assignment)
        progress.phase, progress.share, progress.reason = wanted.phase, wanted.share, wanted.reason
        progress.applied_serial, progress.serving = wanted.serial, wanted.serving
        self._add_up(trial)
        trial.folder.write_progress(progress)
        _log.info("%s: %s %.4g%% with version %d", name, wanted.phase, 100 * wanted.share, wanted.candidate)

    def _add_up(self, trial: _Trial) -> bool:
        """Add up what the instances have counted; return whether it is news."""
        progress, wanted = trial.progress, trial.wanted
        counts = Tally()
        counts.merge(trial.before)
        counts.merge(read_tallies(self._instances, wanted.model, wanted.serial))
        news = any(getattr(progress, key) != getattr(counts, key) for key in _COUNTS)
        for key in _COUNTS:
            setattr(progress, key, getattr(counts, key))
        progress.updated_at = time.time()
        return news

    def _follow(self, trial: _Trial) -> None:
        """Write the counts, and take the next step if the gates, or failures, decide."""
        progress, wanted = trial.progress, trial.wanted
        written_at = progress.updated_at
        if not self._add_up(trial) and progress.updated_at - written_at < _ALIVE_S:
            progress.updated_at = written_at
            return
        self._note(trial.folder, progress)
        failing = progress.failed >= _FEWEST_FAILURES and progress.failed > _MOST_FAILING * progress.requests
        if failing or progress.failed_in_a_row >= _MOST_IN_A_ROW:
            told = f"the candidate failed on {progress.failed} of {progress.requests} requests: {progress.failure}"
            self._abort(wanted, told)
            return
        if self._is_silent(trial):
            self._abort(wanted, f"the candidate has not answered a request for {progress.waiting_s:.0f} s")
            return
        if not wanted.gates.are_set:
            return
        from graphkiln_backend.server.rollout_gates import judge  # needed by rollouts with gates only

        verdict = judge(progress, wanted.gates)
        if verdict.outcome == "fail":
            self._abort(wanted, verdict.reason)
        elif verdict.outcome == "pass":
            self._advance(wanted, verdict.reason)

    def _is_silent(self, trial: _Trial) -> bool:
        """True if the candidate has hung: waiting for a core does not count, computing without end does."""
        progress, name = trial.progress, candidate_name(trial.wanted.model)
        pids = [each.pid for each in read_snapshot(self._instances).statuses.values() if each.model == name]
        starved_at = max(map(self._starvation.starved_at, pids), default=0.0)
        ran_s = sum(core_use(pid)[0] for pid in pids)
        if progress.waiting_s < max(trial.waiting_s, _FRESH_S):  # another copy
            trial.ran_s = ran_s
        trial.waiting_s = progress.waiting_s
        endless_s = max(_ENDLESS_S, _ENDLESS_FACTOR * progress.serving_latency.p99)
        # With traffic it computes for users, too.
        endless = trial.wanted.phase == "shadow" and ran_s - trial.ran_s > endless_s
        return endless or min(progress.waiting_s, time.monotonic() - starved_at) > _SILENT_S

    def _advance(self, wanted: Wanted, reason: str) -> None:
        """Take the next step after the gates have passed."""
        share = next((share for share in wanted.gates.then if share > wanted.traffic), None)
        following = wanted.changed("promoted", reason=reason)
        if share is not None:
            following = wanted.changed("traffic", share, reason)
        with suppress(RolloutError):  # the user has changed it meanwhile
            self._rollouts.folder_of(wanted.model).write_wanted(following)

    def _is_superseded(self, wanted: Wanted, progress: Progress) -> Callable[[], bool]:
        """Make a check that gives up a proof: the server stops, or the user has asked for something else."""
        folder = self._rollouts.folder_of(wanted.model)

        def check() -> bool:
            if time.time() - progress.updated_at > _ALIVE_S:
                progress.updated_at = time.time()
                self._note(folder, progress)
            return self._stop.is_set() or folder.read_wanted(wanted.model) != wanted

        return check

    def _report(self, folder: RolloutFolder, progress: Progress, reason: str) -> None:
        """Write why a candidate is not tried yet."""
        if (progress.phase, progress.reason) != ("", reason) or time.time() - progress.updated_at > _ALIVE_S:
            progress.phase, progress.reason, progress.updated_at = "", reason, time.time()
            self._note(folder, progress)

    def _note(self, folder: RolloutFolder, progress: Progress) -> None:
        """Write how far a rollout is; a full disk must not stop it."""
        try:
            folder.write_progress(progress)
        except OSError as error:
            if self._unwritten != str(error):
                _log.error("the progress of rollouts cannot be written, they go on: %s", error)
            self._unwritten = str(error)
        else:
            self._unwritten = ""


def _check_contract(config: ModelConfigProto, wanted: Wanted) -> None:
    """Refuse a candidate for which clients would have to prepare requests, or to read answers, in another way.

    Raises:
        RolloutError: The preprocessing, labels or task differ.
    """
    if CONTRACTS not in config.parameters:
        return
    contracts = Contracts.from_json(config.parameters[CONTRACTS].string_value)
    serving, candidate = (contracts.find(str(each)) for each in (wanted.serving, wanted.candidate))
    if serving is not None and serving.is_specified and serving != candidate:
        names = ("preprocess", "labels", "output", "ranking", "task")
        differing = [name for name in names if getattr(serving, name) != getattr(candidate, name, None)]
        raise RolloutError(
            f"its {', '.join(differing)} differ from version {wanted.serving}, by which clients prepare requests and "
            "read answers",
            hint="convert it with those of the serving version, or serve it without a rollout",
        )


def _read_progress(folder: RolloutFolder, wanted: Wanted) -> Progress:
    """Read the progress of a rollout, or begin one; versions that were aborted before stay so."""
    known = folder.read_progress(wanted.model)
    if known and known.candidate == wanted.candidate:
        return known
    aborted = known.aborted if known else {}
    return Progress(model=wanted.model, candidate=wanted.candidate, serving=wanted.serving, aborted=aborted)
