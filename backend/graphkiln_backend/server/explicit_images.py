"""The models that take images for others in the user's explicit mode: they come and go with those.

The stores are Triton's there, and such a model has no files in them: it is loaded from what is handed over with the
request. Who loads it by its own name finds a placeholder, in a repository of its own, which says what to load instead.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.image_model import image_model_name
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.image_models import asks_for_images, configure
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.server.run_folder import BACKEND_NAMES

_log = logging.getLogger("graphkiln.server")

_Key = tuple[tuple[int, ...], int]
"""The versions that serve, and when the configuration was written."""


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
