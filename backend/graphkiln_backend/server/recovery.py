"""After a load: replaces versions that failed by older ones, and makes Triton forget the failures.

Triton (24.10) counts a version that failed as not ready for ever (see `server.mirror`). What was tried: neither
unloading the model nor reloading it without the version changes that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

from graphkiln_backend.graph.text import plain_reason
from graphkiln_backend.server.managed_stores import ManagedStores, ServedModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.repository_control import RepositoryControl, VersionState

_log = logging.getLogger("graphkiln.server")

_NOT_READ = "Triton does not take it: see its message above"
_FORGET_TIMEOUT_S = 60.0

ByModel = dict[str, list[VersionState]]


def states_by_model(states: Iterable[VersionState]) -> ByModel:
    """The rows of the index, by model."""
    grouped: ByModel = {}
    for state in states:
        grouped.setdefault(state.model, []).append(state)
    return grouped


def all_loaded(stores: ManagedStores, control: RepositoryControl) -> bool:
    """Whether no version that is shown has failed.

    Args:
        stores: What is served.
        control: The running server.

    Raises:
        OSError: The server does not list its models.
    """
    states = states_by_model(control.index())
    return not any(_failed(model, states.get(name, [])) for name, model in stores.served.items())


def replace_failed(stores: ManagedStores, mirror: Mirror, control: RepositoryControl, *, timeout_s: float) -> None:
    """Loads an older version in the place of each that failed, until there is none left or one serves.

    Args:
        stores: What is served.
        mirror: What Triton sees.
        control: The running server.
        timeout_s: For one load.

    Raises:
        OSError: The server ended, or the mirror cannot be written.
    """
    pending = True
    while pending:
        states = states_by_model(control.index())
        pending = False
        for name, model in list(stores.served.items()):
            failed = _quarantine_failed(stores, model, states.get(name, []), mirror.path / name)
            if failed or stores.is_outdated(model):
                stores.present(mirror, stores.plan(model.stored, model.stored.versions))
                control.load(name, timeout_s)
                pending = True


def _quarantine_failed(stores: ManagedStores, model: ServedModel, states: list[VersionState], shown_as: Path) -> bool:
    """Whether any version of a model that is shown has failed."""
    failed = _failed(model, states)
    for version, reason in failed.items():
        stores.quarantine.add(model.stored, version, brief(reason, shown_as, model.stored.folder))
    return bool(failed)


def _failed(model: ServedModel, states: list[VersionState]) -> dict[int, str]:
    """Why versions failed that are shown."""
    if not any(state.version for state in states):  # it did not come as far as loading a version
        return dict.fromkeys(model.versions, _NOT_READ)
    failed = {int(state.version): state.reason for state in states if state.failed and state.version}
    return {version: reason for version, reason in failed.items() if version in model.versions}


def forget_failures(stores: ManagedStores, mirror: Mirror, control: RepositoryControl) -> None:
    """Brings readiness back where a failed version is no longer shown and another one serves, or the model is gone.

    Args:
        stores: What is served.
        mirror: What Triton sees.
        control: The running server.

    Raises:
        OSError: The server ended, or the mirror cannot be written.
    """
    for name, states in states_by_model(control.index()).items():
        failed = [int(state.version) for state in states if state.failed and state.version]
        serving = [int(state.version) for state in states if state.state == "READY"]
        model = stores.served.get(name)
        if failed and model is None:
            forget_model(name, failed, mirror, control)
        elif failed and serving and model:
            forget_versions(name, failed, serving, mirror, control)


def forget_versions(
    name: str, failed: list[int], serving: list[int], mirror: Mirror, control: RepositoryControl
) -> None:
    """Makes Triton forget that versions failed while others of the model serve.

    Raises:
        OSError: The server ended.
    """
    _log.info("%s: the next errors of Triton are deliberate; they make it forget that a version failed", name)
    try:
        control.load(name, _FORGET_TIMEOUT_S, mirror.forget(failed, serving=serving))
    finally:
        mirror.remove_forgotten()


def forget_model(name: str, failed: list[int], mirror: Mirror, control: RepositoryControl) -> None:
    """Makes Triton forget a model: it is loaded as placeholders, which then are unloaded.

    Raises:
        OSError: The server ended.
    """
    try:
        control.load(name, _FORGET_TIMEOUT_S, mirror.forget(failed, serving=()))
        states = states_by_model(control.index()).get(name, [])
        if not any(state.state == "LOADING" or _is_other(state, failed) for state in states):
            control.unload(name)
    finally:
        mirror.remove_forgotten()
        mirror.remove(name)


def _is_other(state: VersionState, failed: list[int]) -> bool:
    """Whether a version serves that somebody else has loaded meanwhile."""
    return state.state == "READY" and int(state.version) not in failed


def brief(reason: str, shown_as: Path, folder: Path) -> str:
    """Triton's reason without its own wrapping and the traceback of our backend, about the user's files.

    Args:
        reason: As the index has it.
        shown_as: The model's folder as Triton sees it.
        folder: The model's folder in its store.
    """
    return plain_reason(reason).removeprefix(f"{folder.name}: ").replace(str(shown_as), str(folder))
