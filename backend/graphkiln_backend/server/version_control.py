"""The versions that a running server serves: one loop for every `--model-control-mode`.

In the modes `none` and `poll`, Triton runs in explicit mode over a mirror of the stores, and graphkiln decides what is
loaded; in the user's own explicit mode Triton reads the stores, and the user decides. Beside each server that is live
runs one controller, in a thread:

1. Settle: a version that failed at the start gives way to the next older one, so that one bad version takes no other
   with it. A model without any good version stays failed, and readiness says so.
2. Step, again and again in the modes `poll` and `explicit`: copies of stores are brought up to date, then

   - in poll mode, new and changed versions are proven outside the server, and only then loaded;
   - in explicit mode, failed loads of the user leave no trace, and models that take images follow their models.

Triton (24.10) counts a version that failed as not ready for ever; neither unloading the model nor reloading it without
the version changes that. Placeholders (see `server.mirror`) make it forget.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.text import plain_reason
from graphkiln_backend.repository.agreement import HINT, find_disagreement
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.server.flags import ControlMode
from graphkiln_backend.server.image_models import ExplicitImages
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror, StoreView
from graphkiln_backend.server.model_states import explain
from graphkiln_backend.server.repository_control import RepositoryControl, VersionState
from graphkiln_backend.server.store_copies import StoreCopies
from graphkiln_backend.system.signals import ServerStopping

if TYPE_CHECKING:
    from graphkiln_backend.server.admission import Verdict

_log = logging.getLogger("graphkiln.server")

# Proves a version of a model as it would be served; the last argument asks whether to give up.
Admit: TypeAlias = "Callable[[ShownModel, int, Callable[[], bool]], Verdict]"

_SETTLE_ATTEMPTS = 3
_SOON_S = 1.0  # until the next attempt after an error, and the next look at a folder that still changes
_EXPLICIT_S = 0.5  # between two looks at what the user has loaded
_FORGET_TIMEOUT_S = 60.0
# Whatever is under way when a server has ended takes less, except a store on a disk that does not answer.
_END_S = 10.0
_NOT_READ = "Triton does not take it: see its message above"


class VersionController:
    """Control the versions of one run of the server.

    Args:
        mode: The user's control mode.
        stores: What is served; outlives the server.
        mirror: What Triton sees; in explicit mode, what it sees instead of models whose newest version failed.
        control: The running server.
        instances: Status files of its instances.
        admit: Proves a version outside the server.
        copies: Copies of stores to keep up to date.
        load_timeout_s: For one load.
        view: In explicit mode, the stores as Triton sees them.
        images: In explicit mode, the models that take images for others.
        on_loaded: In explicit mode, called with the names of the models that serve.
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
        view: StoreView | None = None,
        images: ExplicitImages | None = None,
        on_loaded: Callable[[list[str]], None] = lambda _: None,
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
        self._view = view
        self._images = images
        self._on_loaded = on_loaded
        self._thread: threading.Thread | None = None
        self._stop = threading.Event()
        self._unforeseen = ""
        self._failed_at_start: set[str] = set()  # in explicit mode
        # In poll mode: what the last look found.
        self._seen: dict[str, StoredModel] = {}
        self._gone: frozenset[str] = frozenset()
        self._devices: dict[Path, int] = {}
        self._unreadable = ""
        self._problems: dict[str, str] = {}

    def begin(self, on_settled: Callable[[], None]) -> None:
        """Begin; the server is live.

        Args:
            on_settled: Called once every model serves that can: at once where nothing failed, otherwise later, by the
                thread.
        """
        settled = self._check_settled()
        if settled:
            on_settled()
        if not settled or self._mode.name != "none":
            rest = None if settled else on_settled
            self._thread = threading.Thread(target=self._run, args=(rest,), name="versions", daemon=True)
            self._thread.start()

    def halt(self) -> None:
        """Change nothing from now on: the server is about to stop."""
        self._stop.set()

    def end(self) -> None:
        """Wait for the thread; the server has ended, which ends a load that is under way."""
        self.halt()
        if self._thread:
            self._thread.join(_END_S)
            if self._thread.is_alive():  # it does nothing more once the store responds
                _log.warning("a model store has not responded for %g s: going on without waiting for it", _END_S)
            self._thread = None

    # The loop.

    def _check_settled(self) -> bool:
        try:
            return self.is_settled()
        except OSError as error:  # the user's own --http-restricted-api, or a server that ends at once
            _log.warning("cannot look after the models: %s", error)
            return True

    def _run(self, on_settled: Callable[[], None] | None) -> None:
        if on_settled:
            for _ in range(_SETTLE_ATTEMPTS):
                if self._attempt(self.settle) is None or self._stop.wait(_SOON_S):
                    break
            if self._stop.is_set():
                return
            on_settled()
        pause: float | None = 0.0
        while pause is not None and not self._stop.wait(pause):
            pause = self._attempt(self.step)

    def _attempt(self, step: Callable[[], float | None]) -> float | None:
        """Run a step; the seconds to the next one, or None for never."""
        try:
            return step()
        except ServerStopping:
            return None
        except OSError as error:
            self._warn(str(error))
        except Exception as error:  # noqa: BLE001 - unforeseen, but no reason never to look at the models again
            is_new, self._unforeseen = repr(error) != self._unforeseen, repr(error)
            self._warn(f"{type(error).__name__}: {error}", error if is_new else None)
        return _SOON_S

    def _warn(self, reason: str, traceback: Exception | None = None) -> None:
        if not self._stop.is_set():  # the server may have ended: the supervisor sees to that
            _log.warning("cannot look after the models just now: %s", reason, exc_info=traceback)

    def is_settled(self) -> bool:
        """Ask the server whether everything is loaded that was to be.

        Raises:
            OSError: The server does not list its models, or the stores cannot be listed.
        """
        states = self._states()
        if self._is_explicit:  # Triton has loaded what the user named
            found = self._stores.scan()
            tried = {name: tuple(int(row.version) for row in rows if row.version) for name, rows in states.items()}
            self._stores.shown = {
                name: ShownModel(stored=found[name], versions=versions)
                for name, versions in tried.items()
                if versions and name in found
            }
        return not any(_failures(model, states.get(name, [])) for name, model in self._stores.shown.items())

    def settle(self) -> None:
        """Give versions that failed at the start a successor.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
        """
        self._replace_failed()
        if self._view:
            self._failed_at_start = {name for name, model in self._stores.shown.items() if not model.versions}
            self._view.show_mirrored(())
        self._forget_failures(self._states())

    def step(self) -> float | None:
        """Do what is due in the user's mode.

        Returns:
            Seconds until the next step; None for never.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
            ServerStopping: The server stops.
        """
        if self._mode.name == "none":
            return None
        copies_due_s = self._copies.follow(self._stop.is_set)
        if self._is_explicit:
            self._follow_user()
            return min(_EXPLICIT_S, copies_due_s)
        pause = min(_SOON_S, self._mode.poll_s) if self._poll() else self._mode.poll_s
        return min(pause, copies_due_s)

    # The user's explicit mode.

    def _follow_user(self) -> None:
        states = self._states()
        self._forget_failures(states)
        serving = {name: versions for name, rows in states.items() if (versions := tuple(_serving(rows)))}
        names = list(serving)
        if self._images:
            self._images.follow(serving)
            names = [name for name in names if not self._images.takes_images(name)]
        self._on_loaded(names)

    # Poll mode: compare the stores with what is served.
    #
    # A folder whose files still change is left alone until two looks in a row find the same. A version that fails is
    # not tried again until its files change, so that a copy that paused half-way is tried again when it went on.

    def _poll(self) -> bool:
        """Take over what changed in the stores; whether something is still changing there."""
        found = self._scan()
        if found is None:
            return False
        before, self._seen = self._seen, found
        unstable = [name for name, stored in found.items() if before.get(name) != stored]
        missing = frozenset(name for name in self._stores.shown if _is_missing(found.get(name)))
        gone = missing & self._gone  # seen twice: a folder that is replaced by renaming is missing for a moment
        self._gone = missing - gone
        for name in sorted(gone):
            _log.info("%s: its store holds no version of it, unloading it", name)
            del self._stores.shown[name]
            self._mirror.remove(name)
            self._control.unload(name)
        changed = [self._update(stored) for name, stored in found.items() if name not in unstable]
        if any(changed) or gone:
            self._replace_failed()
            self._forget_failures(self._states())
        return bool(unstable or self._gone)

    def _scan(self) -> dict[str, StoredModel] | None:
        """Scan the stores; None where one cannot be read, or is suddenly another file system: not empty."""
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
            _log.warning("a model store cannot be read, what is served stays: %s", problem)
        self._unreadable = problem
        return None if problem else found

    def _update(self, stored: StoredModel) -> bool:
        """Show Triton what a folder holds now, as far as it is good, and load it.

        Triton keeps the versions that it serves until the new load succeeds: what is shown from here on may not be what
        serves, and not every version of it may load.

        Returns:
            Whether a load was tried, successful or not: versions that failed need a successor.
        """
        shown = self._stores.shown.get(stored.name)
        if shown is None and stored.problem:
            self._warn_once(stored.name, f"is not served: {stored.problem}")
            return False
        faults = [stored.faults[version] for version in (shown.versions if shown else ()) if version in stored.faults]
        problem = stored.problem if stored.unreadable and shown else "; ".join(faults)
        self._warn_once(stored.name, problem and f"what is served of it stays: {problem}")
        if problem or not stored.versions:
            return False
        planned = self._admissible(stored, shown)
        if not planned.versions or (shown and (planned.shows(shown) or self._replaced_badly(stored, shown))):
            return False
        _log.info("%s: loading version %s", stored.name, ", ".join(map(str, planned.versions)))
        self._stores.present(self._mirror, planned)
        if error := self._control.load(stored.name, self._load_timeout_s):
            _log.error("%s: %s", stored.name, error)
        return True

    def _warn_once(self, name: str, problem: str) -> None:
        if problem and self._problems.get(name) != problem:
            _log.warning("%s: %s", name, problem)
        self._problems[name] = problem

    def _replaced_badly(self, stored: StoredModel, shown: ShownModel) -> bool:
        """True if the newest version that serves has got bad files: it goes on with what it was loaded from."""
        newest = max(shown.versions, default=0)
        return bool(self._stores.quarantine.reason(stored, newest)) and newest in shown.versions

    def _admissible(self, stored: StoredModel, shown: ShownModel | None) -> ShownModel:
        """Select what may be served of a folder: versions that fail to prove themselves give way to older ones."""
        disagreeing: set[int] = set()
        if stored.tensor_model:  # a model that takes images has no files to prove
            return self._stores.plan(stored, ())
        # Every round but the last takes a version out: `plan` leaves out what disagrees, and what `_is_good` put into
        # quarantine.
        while True:
            planned = self._stores.plan(stored, [version for version in stored.versions if version not in disagreeing])
            if shown and (version := self._refuse_disagreeing(planned, shown)):
                disagreeing.add(version)
                continue
            if all(self._is_good(planned, version, shown) for version in planned.versions):
                return planned

    def _refuse_disagreeing(self, planned: ShownModel, shown: ShownModel) -> int:
        """Refuse the newest version if its signature is not that of the versions that serve and stay in the store.

        Another configuration for the versions that serve is what the user asked for.

        Returns:
            The number of the version; 0 for none.
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
        """True if a version is shown already, with these very files, or proves itself now; what fails is in quarantine.

        Where the configuration is not completed, because another backend computes the version or by the user's flags,
        it is not ours to prove.
        """
        if planned.config is None or (shown and shown.shows_version(planned.stored, version)):
            return True
        verdict = self._admit(planned, version, self._stop.is_set)
        if verdict.reason:
            self._stores.quarantine.add(planned.stored, version, verdict.reason)
        else:
            _log.info("%s version %d is admitted: %s", planned.stored.name, version, verdict.words)
        return not verdict.reason

    # After a load: older versions in the place of those that failed, and readiness that comes back.

    def _states(self) -> dict[str, list[VersionState]]:
        """Every version that the server knows, by model."""
        states: dict[str, list[VersionState]] = {}
        for row in explain(self._control.index(), self._instances):
            states.setdefault(row.model, []).append(row)
        return states

    def _replace_failed(self) -> None:
        """Load an older version in the place of each that failed, until one serves or all have failed."""
        pending = True
        while pending:
            states = self._states()
            pending = False
            for name, model in list(self._stores.shown.items()):
                failures = _failures(model, states.get(name, []))
                for version, reason in failures.items():
                    brief = _brief(reason, self._mirror.path / name, model.stored.folder)
                    self._stores.quarantine.add(model.stored, version, brief)
                if failures or self._stores.is_outdated(model):
                    self._stores.present(self._mirror, self._stores.plan(model.stored, model.stored.versions))
                    if self._view:
                        self._view.show_mirrored({name})
                    self._control.load(name, self._load_timeout_s)
                    pending = True

    def _forget_failures(self, states: Mapping[str, list[VersionState]]) -> None:
        """Make Triton forget what failed where another version of the model serves, or the model is gone.

        A model of which nothing could be loaded keeps readiness down: in explicit mode only one that was to be loaded
        at the start, because a load that fails later is answered with the reason.
        """
        stay_failed = self._failed_at_start if self._is_explicit else self._stores.shown.keys()
        for name, rows in states.items():
            failed = [int(row.version) for row in rows if row.failed and row.version]
            serving = _serving(rows)
            is_loading = any(row.state == "LOADING" for row in rows)
            if not failed or is_loading or (name in stay_failed and not serving):
                continue
            if self._is_explicit:
                for row in (row for row in rows if row.failed):
                    reason = _brief(row.reason, self._mirror.path / name, Path(name))
                    _log.error("%s version %s could not be loaded: %s", name, row.version, reason)
            if serving and (self._is_explicit or name in stay_failed):
                self._forget_versions(name, failed, serving)
            else:
                self._forget_model(name, failed)

    def _forget_versions(self, name: str, failed: list[int], serving: list[int]) -> None:
        _log.info("%s: the next errors of Triton are deliberate; they make it forget that a version failed", name)
        try:
            self._control.load(name, _FORGET_TIMEOUT_S, self._mirror.forget(failed, serving=serving))
        finally:
            self._mirror.remove_forgotten()

    def _forget_model(self, name: str, failed: list[int]) -> None:
        """Load placeholders, then unload them, unless the model was loaded again meanwhile."""
        try:
            self._control.load(name, _FORGET_TIMEOUT_S, self._mirror.forget(failed, serving=()))
            rows = self._states().get(name, [])
            if not any(row.state == "LOADING" for row in rows) and set(_serving(rows)) <= set(failed):
                self._control.unload(name)
        finally:
            self._mirror.remove_forgotten()
            self._mirror.remove(name)


def _serving(rows: Sequence[VersionState]) -> list[int]:
    return [int(row.version) for row in rows if row.state == "READY"]


def _failures(model: ShownModel, rows: Sequence[VersionState]) -> dict[int, str]:
    """The reasons for which versions failed that are shown to Triton."""
    if not any(row.version for row in rows):  # it did not come as far as loading a version
        return dict.fromkeys(model.versions, _NOT_READ)
    failed = {int(row.version): row.reason for row in rows if row.failed and row.version}
    return {version: reason for version, reason in failed.items() if version in model.versions}


def _is_missing(stored: StoredModel | None) -> bool:
    return stored is None or not (stored.versions or stored.unreadable)


def _brief(reason: str, shown_as: Path, folder: Path) -> str:
    """Triton's reason without its own wrapping and the traceback of our backend, about the user's files.

    Args:
        reason: As the index has it.
        shown_as: The model's folder as Triton sees it.
        folder: The model's folder in its store.
    """
    return plain_reason(reason).removeprefix(f"{folder.name}: ").replace(str(shown_as), str(folder))
