"""Polls the stores: new and changed versions are proven outside the server, and only then appear in it.

A folder whose files still change is left alone until two scans in a row find the same; one that fails is not tried
again until its files change, so that a copy that paused half-way is tried again when it went on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.agreement import HINT, find_disagreement
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.server.managed_stores import ManagedStores, ServedModel, forget_failures, replace_failed
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.repository_control import RepositoryControl

if TYPE_CHECKING:
    from graphkiln_backend.server.admission import Verdict

_log = logging.getLogger("graphkiln.server")

Admit: TypeAlias = "Callable[[ServedModel, int], Verdict]"  # A model as it would be served, and one of its versions


@dataclass(slots=True)
class Poller:
    """Compares the stores with what is served.

    Args:
        stores: What is served.
        mirror: What Triton sees.
        control: The running server.
        admit: Proves a version.
        load_timeout_s: For one load.
    """

    stores: ManagedStores
    mirror: Mirror
    control: RepositoryControl
    admit: Admit
    load_timeout_s: float
    _seen: dict[str, StoredModel] = field(default_factory=dict)
    _devices: dict[Path, int] = field(default_factory=dict)
    _unreadable: str = ""
    _gone: frozenset[str] = frozenset()
    _stuck: dict[str, str] = field(default_factory=dict)

    def poll(self) -> bool:
        """Takes over what changed.

        Returns:
            Whether something is still changing: another poll should follow soon.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
            AdmissionStopped: The server stops.
        """
        found = self._scan()
        if found is None:
            return False
        before, self._seen = self._seen, found
        unstable = [name for name, stored in found.items() if before.get(name) != stored]
        missing = frozenset(name for name in self.stores.served if _is_missing(found.get(name)))
        gone = missing & self._gone  # seen twice: a folder that is replaced by renaming is missing for a moment
        self._gone = missing - gone
        for name in sorted(gone):
            self._remove(name)
        changed = [self._update(stored) for name, stored in found.items() if name not in unstable]
        if any(changed) or gone:
            replace_failed(self.stores, self.mirror, self.control, timeout_s=self.load_timeout_s)
            forget_failures(self.stores, self.mirror, self.control)
        return bool(unstable or self._gone)

    def _scan(self) -> dict[str, StoredModel] | None:
        """What the stores hold; None where one cannot be read, or is suddenly another file system: not empty."""
        found = None
        try:
            devices = {store: store.stat().st_dev for store in self.stores.stores}
            found = self.stores.scan()
        except OSError as error:
            problem = str(error)
        else:
            problem = "another file system lies there now" if self._devices not in ({}, devices) else ""
            self._devices = self._devices or devices
        self._tell(problem)
        return None if problem else found

    def _tell(self, problem: str) -> None:
        if problem and problem != self._unreadable:
            _log.warning("a model store cannot be read, what is served stays: %s", problem)
        self._unreadable = problem

    def _remove(self, name: str) -> None:
        _log.info("%s: its store holds no version of it, unloading it", name)
        del self.stores.served[name]
        self.mirror.remove(name)
        self.control.unload(name)

    def _update(self, stored: StoredModel) -> bool:
        """Serves what a folder holds now, as far as it is good; whether anything changed."""
        served = self.stores.served.get(stored.name)
        if served is None and stored.problem:
            self._tell_of(stored.name, f"is not served: {stored.problem}")
            return False
        if self._is_stuck(stored, served) or not stored.versions:
            return False
        planned = self._admissible(stored, served)
        if not planned.versions or (served and (planned.shows(served) or self._replaced_badly(stored, served))):
            return False
        _log.info("%s: loading version %s", stored.name, ", ".join(map(str, planned.versions)))
        self.stores.present(self.mirror, planned)
        if error := self.control.load(stored.name, self.load_timeout_s):
            _log.error("%s: %s", stored.name, error)
        return True

    def _is_stuck(self, stored: StoredModel, served: ServedModel | None) -> bool:
        """Whether files of what serves cannot be read just now, which is said once: it goes on as it was loaded."""
        faults = [stored.faults[version] for version in (served.versions if served else ()) if version in stored.faults]
        problem = stored.problem if stored.unreadable and served else "; ".join(faults)
        self._tell_of(stored.name, problem and f"what is served of it stays: {problem}")
        return bool(problem)

    def _tell_of(self, name: str, problem: str) -> None:
        """Says once what is wrong with a model's folder; empty for nothing."""
        if problem and self._stuck.get(name) != problem:
            _log.warning("%s: %s", name, problem)
        self._stuck[name] = problem

    def _replaced_badly(self, stored: StoredModel, served: ServedModel) -> bool:
        """Whether the newest version that serves has got bad files: it goes on with what it was loaded from."""
        newest = max(served.versions, default=0)
        return bool(self.stores.quarantine.reason(stored, newest)) and newest in served.versions

    def _admissible(self, stored: StoredModel, served: ServedModel | None) -> ServedModel:
        """What may be served of a folder: versions that fail to prove themselves give way to older ones."""
        disagreeing: set[int] = set()
        if stored.tensor_model:  # nothing of it need be proven
            return self.stores.plan(stored, ())
        while True:
            planned = self.stores.plan(stored, [version for version in stored.versions if version not in disagreeing])
            if version := self._find_disagreeing(planned, served):
                disagreeing.add(version)
                continue
            failed = next((v for v in planned.versions if not self._is_good(planned, v, served)), None)
            if failed is None:
                return planned

    def _find_disagreeing(self, planned: ServedModel, served: ServedModel | None) -> int:
        """The number of a new version with another signature than those that serve and stay in the store; 0 for none.

        Another configuration for the versions that serve is what somebody asked for.
        """
        if served is None or None in (served.config, planned.config) or not planned.versions:
            return 0
        newest, stored = planned.versions[-1], planned.stored
        stay = set(served.versions) & set(stored.versions)
        if not stay or (newest in stay and served.stored.versions.get(newest) == stored.versions.get(newest)):
            return 0
        problem = find_disagreement(planned.config, served.config)
        if problem:
            serving = ", ".join(map(str, served.versions))
            reason = RepositoryError(
                f"its signature is not that of version {serving}, which serves: {problem}", hint=HINT
            )
            self.stores.disagree(stored, newest, str(reason))
        return newest if problem else 0

    def _is_good(self, planned: ServedModel, version: int, served: ServedModel | None) -> bool:
        if planned.config is None or (served and _serves(served, planned.stored, version)):
            return True
        verdict = self.admit(planned, version)
        if verdict.reason:
            self.stores.quarantine.add(planned.stored, version, verdict.reason)
        else:
            _log.info("%s version %d is admitted: %s", planned.stored.name, version, verdict.words)
        return not verdict.reason


def _is_missing(stored: StoredModel | None) -> bool:
    """Whether a model is no longer in its store."""
    return stored is None or not (stored.versions or stored.unreadable)


def _serves(served: ServedModel, stored: StoredModel, version: int) -> bool:
    """Whether a version with these very files and this configuration is served already."""
    then = served.stored
    same = then.stamp == stored.stamp and then.versions.get(version) == stored.versions.get(version)
    return version in served.versions and same
