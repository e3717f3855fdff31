"""The user's own explicit mode: the stores are Triton's, and what failed leaves no trace.

A load that fails is answered by Triton, with the reason, and what served before goes on serving. A server that started
with strict readiness (`server.readiness`) would stay "not ready" for ever: it is made to forget the failure. After a
crash, the models that were loaded are loaded again; a version that fails then gives way to an older one, as at the
first start.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.preprocess import image_model_name
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.image_models import asks_for_images, configure
from graphkiln_backend.server.managed_stores import (
    ManagedStores,
    ServedModel,
    all_loaded,
    brief,
    forget_model,
    forget_versions,
    replace_failed,
    states_by_model,
)
from graphkiln_backend.server.mirror import Mirror, StoreView
from graphkiln_backend.server.repository_control import LoadOverride, RepositoryControl, VersionState
from graphkiln_backend.server.run_folder import BACKEND_NAMES

# The models that take images for others in the user's explicit mode: they come and go with those.
#
# The stores are Triton's there, and such a model has no files in them: it is loaded from what is handed over with the
# request. Who loads it by its own name finds a placeholder, in a repository of its own, which says what to load
# instead.

_Key = tuple[tuple[int, ...], int]  # the versions that serve, and when the configuration was written


@dataclass(kw_only=True, slots=True)
class ExplicitImages:
    """Loads and unloads models that take images beside those that a user loads and unloads.

    Attributes:
        stores: The user's stores.
        mirror: Holds the placeholders: its path is one of the server's repositories.
        control: The running server.
        load_timeout_s: For one load.
    """

    stores: Sequence[Path]
    mirror: Mirror
    control: RepositoryControl
    load_timeout_s: float
    _configs: dict[Path, tuple[int, bool]] = field(default_factory=dict)
    _loaded: dict[str, _Key] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)

    def takes_images(self, name: str) -> bool:
        """Whether a model is one of ours."""
        return name in self._shown

    def follow(self, serving: Mapping[str, tuple[int, ...]]) -> None:
        """Does with the models that take images what was done with the others.

        Args:
            serving: The versions that serve of each model that the server has loaded.

        Raises:
            OSError: The server ended, or the stores cannot be read.
        """
        found = self._find()
        self._show(found)
        for name in self._loaded.keys() - (serving.keys() & found.keys()):
            self.control.unload(image_model_name(name))
            del self._loaded[name]
        for name in found.keys() & serving.keys():
            key = serving[name], self._configs[found[name]][0]
            if self._loaded.get(name) != key:
                self._loaded[name] = key
                self._load(found[name], serving[name])

    def _find(self) -> dict[str, Path]:
        """The models whose configuration asks for one that takes their images, and the folder of each."""
        found: dict[str, Path] = {}
        taken: set[str] = set()
        for store in self.stores:
            for config in sorted(store.glob(f"*/{CONFIG_FILE}")):
                folder, written = config.parent, config.stat().st_mtime_ns
                if self._configs.get(folder, (0,))[0] != written:
                    self._configs[folder] = written, asks_for_images(folder)
                taken.add(folder.name)
                if self._configs[folder][1]:
                    found[folder.name] = folder
        return {name: folder for name, folder in found.items() if image_model_name(name) not in taken}

    def _show(self, found: Mapping[str, Path]) -> None:
        """Shows a placeholder for each."""
        names = {image_model_name(name): name for name in found}
        for gone in self._shown - names.keys():
            self.mirror.remove(gone)
        for image_model in names.keys() - self._shown:
            name = names[image_model]
            reason = f"{image_model} takes images for '{name}', and is loaded and unloaded with it: load '{name}'"
            self.mirror.refuse(image_model, {1: reason})
        self._shown = {*names}

    def _load(self, folder: Path, versions: tuple[int, ...]) -> None:
        name = image_model_name(folder.name)
        try:
            config = configure(complete_config(folder, BACKEND_NAMES, _as_it_is, versions[-1], versions))
        except GraphkilnError as error:
            _log.error("%s is not served: %s", name, error)
            self.mirror.refuse(name, {1: str(error)})
            return
        if problem := self.control.load(name, self.load_timeout_s, self.mirror.images(folder, versions, config)):
            _log.error("%s could not be loaded: %s", name, problem)


def _as_it_is(version: Path) -> Path:
    return version


_log = logging.getLogger("graphkiln.server")

_EVERY_S = 0.5
_FLAG = "--load-model"
_ALL = "*"


@dataclass(slots=True)
class LoadedModels:
    """What was loaded when a server was last seen; outlives its restarts.

    Attributes:
        versions: The versions of each model that served; None before the first server was live.
    """

    versions: dict[str, tuple[int, ...]] | None = None

    def arguments(self, typed: Sequence[str], found: Collection[str] = ()) -> list[str]:
        """The user's arguments, with what was loaded in the place of what the user had loaded first.

        Args:
            typed: The user's.
            found: The models of the stores, which stand for `*`: Triton would take every folder for one.
        """
        every = named_models(typed) == [_ALL]
        models = found if self.versions is None and every else self.versions
        if models is None:
            return list(typed)
        words = iter(typed)
        kept = []
        for word in words:
            if word == _FLAG:
                next(words, None)
            elif not word.startswith(f"{_FLAG}="):
                kept.append(word)
        return [*kept, *(f"{_FLAG}={model}" for model in models)]


def named_models(arguments: Sequence[str]) -> list[str]:
    """The models that arguments of the server name to be loaded at its start."""
    following = [value for word, value in pairwise(arguments) if word == _FLAG]
    return following + [word.partition("=")[2] for word in arguments if word.startswith(f"{_FLAG}=")]


def may_all_load(arguments: Sequence[str], found: Mapping[str, StoredModel]) -> bool:
    """Whether a server loads models at its start, of which each is there and none is known to be bad; else says which.

    Args:
        arguments: Of the server.
        found: What lies in its stores, by name.
    """
    names = named_models(arguments)
    faults = {name: fault for name in names if (fault := _fault(found.get(name)))}
    for name, fault in faults.items():  # of which Triton would tell something else, if anything
        _log.error("%s is not loaded: %s", name, fault)
    return bool(names) and not faults


def _fault(model: StoredModel | None) -> str:
    if model is None:
        return "no store holds such a model"
    return model.problem or ("" if model.sound_versions else "; ".join(model.faults.values()))


@dataclass(kw_only=True, slots=True)
class ExplicitKeeper:
    """Looks after a server that the user controls.

    Attributes:
        stores: What was tried, and what is kept away when it starts.
        mirror: Holds what is shown instead of a model's own folder.
        view: What Triton sees.
        control: The running server.
        loaded: What is loaded.
        load_timeout_s: For one load.
    """

    stores: ManagedStores
    mirror: Mirror
    view: StoreView
    control: RepositoryControl
    loaded: LoadedModels
    load_timeout_s: float
    _failed_at_start: set[str] = field(default_factory=set)
    _images: ExplicitImages = field(init=False)

    ticks = True

    def __post_init__(self) -> None:
        self._images = ExplicitImages(
            stores=self.stores.stores,
            mirror=image_mirror(self.mirror),
            control=self.control,
            load_timeout_s=self.load_timeout_s,
        )

    def is_settled(self) -> bool:
        """Whether everything that was to be loaded at the start is.

        Raises:
            OSError: The server does not list its models, or the stores cannot be listed.
        """
        self._take_stock()
        return all_loaded(self.stores, self.control)

    def settle(self) -> None:
        """Gives versions that failed at the start a successor.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
        """
        shown = _MirroredLoads(self.control, self.view)
        replace_failed(self.stores, self.mirror, shown, timeout_s=self.load_timeout_s)
        self._failed_at_start = {name for name, model in self.stores.served.items() if not model.versions}
        self.view.show_mirrored(())
        self.tick()

    def tick(self) -> float | None:
        """Has Triton forget what failed since.

        Raises:
            OSError: The server ended, or the mirror cannot be written.
        """
        states = states_by_model(self.control.index())
        idle = {name: rows for name, rows in states.items() if not any(row.state == "LOADING" for row in rows)}
        for name, rows in idle.items():
            self._forget(name, rows)
        serving = {name: versions for name, rows in states.items() if (versions := _serving(rows))}
        self._images.follow(serving)
        own = {name: versions for name, versions in serving.items() if not self._images.takes_images(name)}
        self.loaded.versions = own
        return _EVERY_S

    def _take_stock(self) -> None:
        """What Triton was told to load, as if we had shown it."""
        states = states_by_model(self.control.index())
        found = self.stores.scan()
        self.stores.served = {
            name: ServedModel(stored=found[name], versions=versions)
            for name, rows in states.items()
            if (versions := _tried(rows)) and name in found
        }

    def _forget(self, name: str, rows: list[VersionState]) -> None:
        """Has Triton forget what failed of a model, if anything did."""
        failed = [int(row.version) for row in rows if row.failed]
        serving = _serving(rows)
        if not failed or (name in self._failed_at_start and not serving):
            return
        for row in rows:
            if row.failed:
                reason = brief(row.reason, self.mirror.path / name, Path(name))
                _log.error("%s version %s could not be loaded: %s", name, row.version, reason)
        if serving:
            forget_versions(name, failed, list(serving), self.mirror, self.control)
        else:
            forget_model(name, failed, self.mirror, self.control)


def image_mirror(mirror: Mirror) -> Mirror:
    """Where the models stand that take images, beside what is shown of the stores."""
    return Mirror(mirror.path.parent / "images")


@dataclass(frozen=True, slots=True)
class _MirroredLoads:
    """Loads a model as the mirror has it."""

    control: RepositoryControl
    view: StoreView

    def index(self) -> list[VersionState]:
        return self.control.index()

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        self.view.show_mirrored({model})
        return self.control.load(model, timeout_s, override)

    def unload(self, model: str) -> None:
        self.control.unload(model)


def _serving(rows: Sequence[VersionState]) -> tuple[int, ...]:
    return tuple(int(row.version) for row in rows if row.state == "READY")


def _tried(rows: Sequence[VersionState]) -> tuple[int, ...]:
    return tuple(int(row.version) for row in rows if row.version)
