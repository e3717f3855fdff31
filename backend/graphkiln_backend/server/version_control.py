"""Control the versions of a running server: one loop for every `--model-control-mode`.

In the modes `none` and `poll`, Triton runs in explicit mode over a mirror of the stores, and graphkiln loads and
unloads models; in the user's explicit mode Triton reads the stores and the user decides. Each live server has one
controller, in a thread:

1. Settle: replace each version that failed at the start by the next older one, by the mirror or, in explicit mode, by a
   load request with a version policy. A model without a good version stays failed, and the server is not ready.
2. Step, repeatedly in the modes `poll` and `explicit`: update the copies of stores, then

   - in poll mode, prove new and changed versions outside of the server, and load those that pass;
   - in explicit mode, log failed loads, and load and unload the models that take images with their models.

Versions that no instance of graphkiln computes are asked their golden samples after each load, and now and then while
they serve (`server.served_proofs`); one that computes wrong outputs is replaced like one that failed to load.

Triton (24.10) reports a failed version as not ready forever, even after the model is unloaded or reloaded without it.
Placeholders (see `server.mirror`) clear such failures. In explicit mode they are used in loads that fail alone: a load
that succeeds, and the unload after it, could take away what the user has loaded meanwhile.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf import json_format

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.text import plain_reason
from graphkiln_backend.repository.agreement import HINT, find_disagreement
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.flags import ControlMode
from graphkiln_backend.server.image_models import ExplicitImages
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.model_states import explain
from graphkiln_backend.server.repository_control import LoadOverride, RepositoryControl, VersionState
from graphkiln_backend.server.store_copies import StoreCopies
from graphkiln_backend.system.signals import ServerStopping

if TYPE_CHECKING:
    from graphkiln_backend.server.admission import Verdict
    from graphkiln_backend.server.golden_requests import Asking
    from graphkiln_backend.server.served_proofs import ServedProofs

_log = logging.getLogger("graphkiln.server")

# Proves a version of a model with its serving configuration; the last argument returns true to give up.
Admit: TypeAlias = "Callable[[ShownModel, int, Callable[[], bool]], Verdict]"

_SETTLE_ATTEMPTS = 3
_SOON_S = 1.0  # before the next attempt after an error, and the next scan of a folder that still changes
_IDLE_S = 5.0  # to wait until a model is idle, before each golden sample
_EXPLICIT_S = 0.5  # between two looks at the loaded models in explicit mode
_FORGET_TIMEOUT_S = 60.0
# A step that is running when the server ends takes less, except on a disk that does not respond.
_END_S = 10.0
_NOT_READ = "Triton does not accept it: see its message above"


class VersionController:
    """Control the versions of one run of the server.

    Args:
        mode: The user's control mode.
        stores: The models shown to Triton; kept across restarts of the server.
        mirror: The repository that Triton sees, except in explicit mode.
        control: Repository control of the running server.
        instances: Folder of its status files.
        admit: Proves a version outside of the server.
        copies: Copies of stores to update.
        load_timeout_s: Time limit for one load.
        images: In explicit mode, the models that take images.
        on_loaded: In explicit mode, called with the names of the serving models.
        proofs: Proofs of versions that no instance of graphkiln computes.
        first_replay: First replay of all their golden samples, begun with the server.
        replay_interval_s: Seconds between two replays of their golden samples; 0 for none.
        strict: Whether one failed version makes the server not ready.

    Attributes:
        fault: Why the server must be restarted, because a version that was right computes wrong outputs; else empty.
    """

    def __init__(
        self,
        *,
        mode: ControlMode,
        stores: ManagedStores,
        mirror: Mirror,
        control: RepositoryControl,
        instances: Path,
        admit: Admit,
        load_timeout_s: float,
        copies: StoreCopies | None = None,
        images: ExplicitImages | None = None,
        on_loaded: Callable[[list[str]], None] = lambda _: None,
        proofs: ServedProofs | None = None,
        first_replay: Asking | None = None,
        replay_interval_s: float = 0.0,
        strict: bool = True,
    ) -> None:
        self._mode = mode
        self._is_explicit = mode.name == "explicit"
        self._stores = stores
        self._mirror = mirror
        self._control = control
        self._instances = instances
        self._admit = admit
        self._copies = copies or StoreCopies()
        self._load_timeout_s = load_timeout_s
        self._images = images
        self._on_loaded = on_loaded
        self._proofs = proofs
        self._first_replay = first_replay
        self._replay_interval_s = replay_interval_s
        self._strict = strict
        self._unasked: set[str] = set()  # models that were loaded, and not asked their golden samples since
        # In explicit mode: what served at the last look, and what Triton had counted of it.
        self._followed: dict[str, ShownModel] = {}
        self._counters: dict[tuple[str, int], dict[str, int]] = {}
        self.fault = ""
        self._thread: threading.Thread | None = None
        self._changing = threading.Lock()  # held while versions are loaded
        self._stop = threading.Event()
        self._unforeseen = ""
        self._logged: set[tuple[str, str, str]] = set()  # in explicit mode: failures at the last look
        self._unanswered: set[str] = set()  # models whose load request got no response: it is sent again
        # In poll mode: results of the last scan.
        self._seen: dict[str, StoredModel] = {}
        self._gone: frozenset[str] = frozenset()
        self._devices: dict[Path, int] = {}
        self._unreadable = ""
        self._problems: dict[str, str] = {}

    def begin(self, on_settled: Callable[[], None]) -> None:
        """Begin to control a live server.

        Args:
            on_settled: Called once failed versions are replaced: immediately if none failed, otherwise by the thread.
        """
        try:
            settled = self.is_settled()
        except OSError as error:  # the user's own --http-restricted-api, or a server that ends at once
            _log.warning("cannot control the models: %s", error)
            settled = True
        if self._proofs:
            for model in self._stores.shown.values():
                self._proofs.note(model)
        if settled:
            on_settled()
        if self._proofs and self._replay_interval_s:
            threading.Thread(target=self._replay_now_and_then, name="replays", daemon=True).start()
        if not settled or self._mode.name != "none":
            rest = None if settled else on_settled
            self._thread = threading.Thread(target=self._run, args=(rest,), name="versions", daemon=True)
            self._thread.start()

    def halt(self) -> None:
        """Make no further changes: the server is about to stop."""
        self._stop.set()

    def end(self) -> None:
        """Wait for the thread after the end of the server, which ends a pending load."""
        self.halt()
        if self._thread:
            self._thread.join(_END_S)
            if self._thread.is_alive():  # it changes nothing once the store responds
                _log.warning("a model store has not responded for %g s: continuing without it", _END_S)
            self._thread = None

    # The loop.

    def _run(self, on_settled: Callable[[], None] | None) -> None:
        if on_settled:
            for _ in range(_SETTLE_ATTEMPTS):
                if self._attempt(self._exclusively(self.settle)) is None or self._stop.wait(_SOON_S):
                    break
            if self._stop.is_set():
                return
            on_settled()
        pause: float | None = 0.0
        while pause is not None and not self._stop.wait(pause):
            pause = self._attempt(self._exclusively(self.step))

    def refresh(self, name: str) -> None:
        """Load the versions of a model that its rollout allows, and clear failures.

        In the mode none, only the rollout's own versions replace those that serve.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
            ServerStopping: The server is stopping.
        """
        with self._changing:
            stored, shown = self._stores.scan().get(name), self._stores.shown.get(name)
            wanted = self._stores.rollouts.wanted.get(name)
            if stored and shown and wanted and self._mode.name == "none":
                promoted = {wanted.candidate} if wanted.phase == "promoted" else set()
                kept = {*shown.versions, wanted.serving} | promoted
                stored = replace(stored, versions={key: stored.versions[key] for key in stored.versions if key in kept})
            if stored and self._update(stored):
                self._replace_failed()
            self._forget_failures(self._states())

    def _attempt(self, step: Callable[[], float | None]) -> float | None:
        """Run a step; return the seconds to the next one, or None for never."""
        try:
            return step()
        except ServerStopping:
            return None
        except OSError as error:
            self._warn(str(error))
        except Exception as error:  # noqa: BLE001 - keep controlling the models after an unexpected error
            is_new, self._unforeseen = repr(error) != self._unforeseen, repr(error)
            self._warn(f"{type(error).__name__}: {error}", error if is_new else None)
        return _SOON_S

    def _exclusively(self, step: Callable[[], float | None]) -> Callable[[], float | None]:
        def run() -> float | None:
            with self._changing:
                return step()

        return run

    def _warn(self, reason: str, traceback: Exception | None = None) -> None:
        if not self._stop.is_set():  # a dead server is the supervisor's task
            _log.warning("cannot control the models, retrying: %s", reason, exc_info=traceback)

    def is_settled(self) -> bool:
        """Return true if every version that should be loaded is loaded.

        Raises:
            OSError: The server does not list its models, or the stores cannot be listed.
        """
        states = self._states()
        if self._is_explicit:  # Triton has loaded the user's models
            found = self._stores.scan()
            tried = {name: tuple(int(row.version) for row in rows if row.version) for name, rows in states.items()}
            self._stores.shown = {
                name: ShownModel(stored=found[name], versions=versions, other=self._stores.is_other(found[name]))
                for name, versions in tried.items()
                if versions and name in found
            }
        self._unasked = {name for name, model in self._stores.shown.items() if model.provable}
        failed = any(_failures(model, states.get(name, [])) for name, model in self._stores.shown.items())
        return not failed and not self._unasked

    def settle(self) -> None:
        """Replace versions that failed at the start by older ones.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
        """
        self._replace_failed()
        if self._is_explicit:
            self._followed = {name: model for name, model in self._stores.shown.items() if name not in self._unasked}
        self._forget_failures(self._states())

    def step(self) -> float | None:
        """Run one step of the control mode.

        Returns:
            Seconds until the next step; None for never.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
            ServerStopping: The server is stopping.
        """
        if self._mode.name == "none":
            return None
        copies_due_s = self._copies.follow(self._stop.is_set)
        if self._is_explicit:
            self._follow_user()
            return min(_EXPLICIT_S, copies_due_s)
        pause = min(_SOON_S, self._mode.poll_s) if self._poll() else self._mode.poll_s
        return min(pause, copies_due_s)

    # Golden samples of versions that no instance of graphkiln computes.

    def _replay_now_and_then(self) -> None:
        """Replay the golden samples of what serves, until one is wrong; main function of a thread."""
        pause_s = min(_SOON_S, self._replay_interval_s)  # a start has asked one sample of each version only
        while not self.fault and not self._stop.wait(pause_s):
            self._attempt(self._replay)
            pause_s = self._replay_interval_s

    def _replay(self) -> None:
        models = self._unchanged()
        wrong = self._proofs.replay(models, self._stop.is_set, idle_s=_IDLE_S) if self._proofs else {}
        same = self._unchanged() if wrong else []
        for (name, version), reason in wrong.items():
            if any(model.stored.name == name and model in models for model in same):  # it was not replaced meanwhile
                self.fault = f"{name} version {version} computes wrong outputs: {reason}"
                _log.error("replayed samples: %s", self.fault)

    def _unchanged(self) -> list[ShownModel]:
        """Return the serving models with golden samples whose files are those that were loaded."""
        models = [*(self._followed if self._is_explicit else self._stores.shown).values()]
        models = [model for model in models if model.provable]
        found = self._stores.scan() if models else {}
        return [
            model
            for model in models
            if (stored := found.get(model.stored.name))
            and all(model.shows_version(stored, version) for version in model.versions)
        ]

    def _quarantine_wrong(self, states: Mapping[str, list[VersionState]]) -> set[str]:
        """Ask newly loaded versions their golden samples; return the names of models with a version in quarantine."""
        names = {name for name in self._unasked if name in self._stores.shown and _serving(states.get(name, []))}
        if self._proofs is None or not names:
            return set()
        first, self._first_replay = self._first_replay, None
        wrong = self._proofs.replay([self._stores.shown[name] for name in names], self._stop.is_set, asking=first)
        self._unasked -= names
        for (name, version), reason in wrong.items():
            self._stores.refuse(self._stores.shown[name], version, reason, was_proven=True)
        return {name for name, _ in wrong}

    # The user's explicit mode.

    def _follow_user(self) -> None:
        states = self._states()
        self._log_failures(states)
        if self._strict:
            self._forget_failures(states)
        serving = {name: versions for name, rows in states.items() if (versions := tuple(_serving(rows)))}
        self._take_back_wrong(serving)
        names = list(serving)
        if self._images:
            self._images.follow(serving)
            names = [name for name in names if not self._images.takes_images(name)]
        self._on_loaded(names)

    def _log_failures(self, states: Mapping[str, list[VersionState]]) -> None:
        rows = [row for rows in states.values() for row in rows if row.failed and row.version]
        known, self._logged = self._logged, {(row.model, row.version, row.reason) for row in rows}
        refused = self._stores.refusals() if self._logged - known else {}  # logged when it was replaced at the start
        for name, version, text in sorted(self._logged - known):
            if (name, version) not in refused:
                reason = brief(text, self._mirror.path / name, Path(name))
                _log.error("%s version %s could not be loaded: %s", name, version, reason)

    def _take_back_wrong(self, serving: Mapping[str, tuple[int, ...]]) -> None:
        """Ask what the user has loaded its golden samples, and replace wrong versions by older ones.

        Triton reads the user's stores itself in this mode, so that a version can be asked only once it serves.
        """
        if self._proofs is None:
            return
        for name in {row.model for row in self._proofs.book.rows()} - serving.keys():
            self._proofs.book.keep(name, ())
        # Triton counts anew after each load, and tells nothing else about it: a counter below that of the last look
        # shows a version that was replaced in place. One that has passed all of them since is found by the replays.
        counters = self._proofs.read_counters(self._followed.values())
        again = {
            which[0]
            for which, now in counters.items()
            if any(now.get(name, 0) < count for name, count in self._counters.get(which, {}).items())
        }
        self._counters = counters
        self._followed = {
            name: model
            for name, model in self._followed.items()
            if model.versions == serving.get(name) and name not in again
        }
        loaded = serving.keys() - self._followed.keys()
        if not loaded:
            return
        found = self._stores.scan()
        models = {
            name: ShownModel(stored=found[name], versions=serving[name], other=self._stores.is_other(found[name]))
            for name in loaded & found.keys()
        }
        for model in models.values():
            self._proofs.note(model)
        wrong = self._proofs.replay([*models.values()], self._stop.is_set)
        self._counters |= self._proofs.read_counters(models.values())
        changed: set[str] = set()
        for (name, version), reason in wrong.items():
            stored = models[name].stored
            if self._stores.scan().get(name) != stored or _serving(self._states().get(name, [])) != [*serving[name]]:
                changed.add(name)  # by the user, or loaded again: ask again
                continue
            self._stores.quarantine.add(stored, version, reason)
            planned = self._stores.plan(stored, stored.versions)
            self._show(planned)
            if not planned.versions:
                self._control.unload(name)
        # Last: the server is restarted if a version that is followed is wrong.
        self._followed |= {name: model for name, model in models.items() if name not in changed}

    # Poll mode: compare the stores with the shown models.
    #
    # A folder is ignored until two consecutive scans find the same files. A failed version is not tried again until its
    # files change, so that an interrupted copy is tried again once it continues.

    def _poll(self) -> bool:
        """Apply changes of the stores; return true if something is still changing."""
        found = self._scan()
        if found is None:
            return False
        before, self._seen = self._seen, dict(found)
        unstable = [name for name, stored in found.items() if before.get(name) != stored]
        missing = frozenset(name for name in self._stores.shown if _is_missing(found.get(name)))
        gone = missing & self._gone  # missing in two scans: a folder replaced by renaming is missing for a moment
        self._gone = missing - gone
        for name in sorted(gone):
            _log.info("%s: its store has no version of it, unloading it", name)
            self._mirror.remove(name)
            self._control.unload(name)
            if self._proofs:
                self._proofs.book.keep(name, ())
            del self._stores.shown[name]  # last: the next step tries again if Triton does not respond
            self._unanswered.discard(name)
            self._unasked.discard(name)
        changed = [self._update(stored) for name, stored in found.items() if name not in unstable]
        if any(changed) or gone or self._unanswered or self._unasked:
            self._replace_failed()
            self._forget_failures(self._states())
        return bool(unstable or self._gone or self._seen.keys() != found.keys())

    def _scan(self) -> dict[str, StoredModel] | None:
        """Scan the stores; return None if one cannot be read, or another file system is mounted there."""
        found = None
        try:
            devices = {store: store.stat().st_dev for store in self._stores.stores}
            found = self._stores.scan()
        except OSError as error:
            problem = str(error)
        else:
            problem = "another file system is mounted there now" if self._devices not in ({}, devices) else ""
            self._devices = self._devices or devices
        if problem and problem != self._unreadable:
            _log.warning("a model store cannot be read, loaded models keep serving: %s", problem)
        self._unreadable = problem
        return None if problem else found

    def _update(self, stored: StoredModel) -> bool:
        """Show the good versions of a folder to Triton and load them.

        Triton keeps serving the old versions until the new load succeeds; the shown versions may differ from the
        serving ones, and some may fail to load.

        Returns:
            Whether a load was attempted, so that failed versions need a replacement.
        """
        shown = self._stores.shown.get(stored.name)
        # 1. Report problems of the folder; the loaded versions keep serving.
        if shown is None and stored.problem:
            self._warn_once(stored.name, f"is not served: {stored.problem}")
            return False
        faults = [stored.faults[version] for version in (shown.versions if shown else ()) if version in stored.faults]
        problem = stored.problem if stored.unreadable and shown else "; ".join(faults)
        self._warn_once(stored.name, problem and f"its loaded versions keep serving: {problem}")
        if problem or not stored.versions:
            return False
        # 2. Select versions that pass their proof.
        try:
            planned = self._admissible(stored, shown)
        except _ChangedMeanwhile as change:
            _log.info("%s: it is proven again", change)
            self._seen.pop(stored.name, None)  # wait until two scans find the same files
            return False
        if not planned.versions or (shown and planned.shows(shown)):
            return False
        # 3. Load them.
        _log.info("%s: loading version %s", stored.name, ", ".join(map(str, planned.versions)))
        if error := self._show(planned):
            _log.error("%s: %s", stored.name, error)
        return True

    def _warn_once(self, name: str, problem: str) -> None:
        if problem and self._problems.get(name) != problem:
            _log.warning("%s: %s", name, problem)
        self._problems[name] = problem

    def _admissible(self, stored: StoredModel, shown: ShownModel | None) -> ShownModel:
        """Select the versions of a folder to serve: older ones replace those that fail their proof.

        If the newest shown version has bad files now, it keeps serving until there is a newer good version.
        """
        disagreeing: set[int] = set()
        if stored.tensor_model:  # a model that takes images has nothing to prove
            return self._stores.plan(stored, ())
        # Every round but the last removes a version: one that disagrees, or one that `_is_good` quarantined.
        while True:
            planned = self._stores.plan(stored, [version for version in stored.versions if version not in disagreeing])
            if shown and (version := self._refuse_disagreeing(planned, shown)):
                disagreeing.add(version)
                continue
            newest = max(shown.versions, default=0) if shown else 0
            if shown and max(planned.versions, default=0) < newest and self._stores.quarantine.reason(stored, newest):
                return shown
            if all(self._is_good(planned, version, shown) for version in planned.versions):
                return planned

    def _refuse_disagreeing(self, planned: ShownModel, shown: ShownModel) -> int:
        """Refuse the newest version if its signature differs from that of the serving versions that stay in the store.

        A changed configuration of the serving versions is accepted, as the user's wish.

        Returns:
            Number of the refused version; 0 for none.
        """
        if None in (shown.config, planned.config) or not planned.versions:
            return 0
        newest, stored = planned.versions[-1], planned.stored
        stay = set(shown.versions) & set(stored.versions)
        if not stay or (newest in stay and shown.stored.versions.get(newest) == stored.versions.get(newest)):
            return 0
        problem = find_disagreement(planned.config, shown.config)
        if problem:
            serving = ", ".join(map(str, shown.versions))
            reason = f"its signature is not that of version {serving}, which serves: {problem}"
            self._stores.disagree(stored, newest, str(RepositoryError(reason, hint=HINT)))
        return newest if problem else 0

    def _is_good(self, planned: ShownModel, version: int, shown: ShownModel | None) -> bool:
        """True if a version is already shown with the same files, or passes its proof now; otherwise quarantine it.

        Versions without a completed configuration (of other backends, or by the user's flags) are proven if they have
        golden samples.

        Raises:
            _ChangedMeanwhile: Its files changed during the proof.
        """
        if shown and shown.shows_version(planned.stored, version) and shown.native == planned.native:
            return True
        stored = planned.stored
        if version in planned.provable and self._proofs:
            answers = self._proofs.admit([(planned, version)], self._stop.is_set)[stored.name, version]
            if self._has_changed(stored, version):
                raise _ChangedMeanwhile(f"{stored.name} version {version} has changed while it was proven")
            reason, words = answers.reason, answers.verdict
        elif planned.config is None:
            return True  # it is not known what it should compute
        else:
            verdict = self._admit(planned, version, self._stop.is_set)
            reason, words = verdict.reason, verdict.words
        if reason:
            self._stores.refuse(planned, version, reason)
        else:
            _log.info("%s version %d is admitted: %s", stored.name, version, words)
        return not reason

    def _has_changed(self, stored: StoredModel, version: int) -> bool:
        """True if the files of a version or its model are not those of the scan any more."""
        now = self._stores.scan().get(stored.name)
        return now is None or (now.stamp, now.versions.get(version)) != (stored.stamp, stored.versions.get(version))

    # After a load: replace failed versions by older ones, and restore readiness.

    def _states(self) -> dict[str, list[VersionState]]:
        """All versions known to the server, by model."""
        states: dict[str, list[VersionState]] = {}
        for row in explain(self._control.index(), self._instances):
            states.setdefault(row.model, []).append(row)
        return states

    def _replace_failed(self) -> None:
        """Replace each failed version by an older one, until one serves or all have failed."""
        pending = True
        while pending:
            states = self._states()
            wrong = self._quarantine_wrong(states)
            pending = False
            for name, model in list(self._stores.shown.items()):
                if name in self._unanswered:
                    self._show(model)
                    pending = True
                    continue
                failures = _failures(model, states.get(name, []))
                if failures and self._is_explicit and self._stores.scan().get(name) != model.stored:
                    del self._stores.shown[name]  # the user has changed its files, and loads it
                    continue
                for version, reason in failures.items():
                    text = brief(reason, self._mirror.path / name, model.stored.folder)
                    self._stores.quarantine.add(model.stored, version, text)
                if failures or name in wrong or self._stores.is_outdated(model):
                    planned = self._stores.plan(model.stored, model.stored.versions)
                    if name in wrong and not planned.versions:  # a load that fails leaves what serves
                        self._control.unload(name)
                    self._show(planned)
                    pending = True

    def _show(self, planned: ShownModel) -> str:
        """Load other versions of a model; in explicit mode, the next load is of the user's files again.

        Returns:
            Triton's error, or an empty text.
        """
        name, override = planned.stored.name, None
        if not self._is_explicit:
            self._stores.present(self._mirror, planned)
        else:
            self._stores.shown[name] = planned
            if not planned.versions:
                return ""
            config = read_config(planned.stored.folder / CONFIG_FILE)
            config.ClearField("version_policy")
            config.version_policy.specific.versions.extend(planned.versions)
            override = LoadOverride(config=json_format.MessageToJson(config))
        self._unanswered.add(name)
        error = self._control.load(name, self._load_timeout_s, override)
        self._unanswered.discard(name)
        self._unasked.discard(name)
        if planned.provable:
            self._unasked.add(name)
        if self._proofs:
            self._proofs.note(planned)
        return error

    def _forget_failures(self, states: Mapping[str, list[VersionState]]) -> None:
        """Clear failures in Triton if another version of the model serves or, in managed stores, the model is gone.

        A model without a good version keeps the server not ready. In explicit mode so does a failed load of a model
        that does not serve, until it is loaded well, if the server's readiness is strict: what would clear it could
        take away what the user loads meanwhile.
        """
        for name, rows in states.items():
            failed = [int(row.version) for row in rows if row.failed and row.version]
            serving = _serving(rows)
            is_gone = not self._is_explicit and name not in self._stores.shown
            if not failed or any(row.state == "LOADING" for row in rows) or not (serving or is_gone):
                continue
            try:
                if is_gone:
                    self._forget_model(name, failed)
                else:
                    _log.info("%s: the next errors of Triton are deliberate; they clear a version's failure", name)
                    self._control.load(name, _FORGET_TIMEOUT_S, self._mirror.forget(failed, serving=serving))
            finally:
                self._mirror.remove_forgotten()

    def _forget_model(self, name: str, failed: list[int]) -> None:
        """Load and unload placeholders, unless the model was loaded again meanwhile."""
        try:
            self._control.load(name, _FORGET_TIMEOUT_S, self._mirror.forget(failed, serving=()))
            rows = self._states().get(name, [])
            if not any(row.state == "LOADING" for row in rows) and set(_serving(rows)) <= set(failed):
                self._control.unload(name)
        finally:
            self._mirror.remove(name)


class _ChangedMeanwhile(Exception):
    """The files of a version changed while it was proven."""


def _serving(rows: Sequence[VersionState]) -> list[int]:
    return [int(row.version) for row in rows if row.state == "READY"]


def _failures(model: ShownModel, rows: Sequence[VersionState]) -> dict[int, str]:
    """Reasons of failed versions among those shown to Triton."""
    if not any(row.version for row in rows):  # it failed before a version was loaded
        return dict.fromkeys(model.versions, _NOT_READ)
    failed = {int(row.version): row.reason for row in rows if row.failed and row.version}
    return {version: reason for version, reason in failed.items() if version in model.versions}


def _is_missing(stored: StoredModel | None) -> bool:
    return stored is None or not (stored.versions or stored.unreadable)


def brief(reason: str, shown_as: Path, folder: Path) -> str:
    """Shorten Triton's reason, and replace paths of the mirror by those of the user's store.

    Args:
        reason: Reason in the repository index.
        shown_as: The model's folder as Triton sees it.
        folder: The model's folder in its store.
    """
    return plain_reason(reason).removeprefix(f"{folder.name}: ").replace(str(shown_as), str(folder))
