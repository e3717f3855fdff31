"""Image models: `NAME.images` takes encoded images for the model `NAME`.

An image model has no files. It is loaded and unloaded with its tensor model, and has the same versions.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES, accepts_images, image_model_name
from graphkiln_backend.images.formats import FORMATS
from graphkiln_backend.repository.config import ModelConfigProto, read_config
from graphkiln_backend.repository.image_config import image_config, publish_image_model
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.server.run_folder import BACKEND_NAMES
from graphkiln_backend.system.resources import usable_cores

_log = logging.getLogger("graphkiln.server")


# Two, so that one decodes while the other waits for the session; more on many cores. Each has as many threads as there
# are cores, and takes about 70 MB.
_FEWEST_INSTANCES, _MOST_INSTANCES = 2, 4
_CORES_PER_INSTANCE = 4


def add_image_models(found: Mapping[str, StoredModel]) -> dict[str, StoredModel]:
    """Add the image models to the models of stores."""
    takers = {
        image_model_name(name): replace(
            stored, tensor_model=name, problem=_problem(stored, found.get(image_model_name(name)))
        )
        for name, stored in found.items()
        if _asks_as_stamped(stored.folder, stored.stamp)
    }
    return {**found, **takers}


def complete_pair(config: ModelConfigProto) -> None:
    """Publish the image model in a complete configuration, in place, if the model accepts images."""
    if find_taker(config) is not None:
        publish_image_model(config)


def find_taker(config: ModelConfigProto) -> ModelConfigProto | None:
    """Configuration of a model's image model; None if it has none."""
    if not accepts_images(config.parameters[ACCEPT_IMAGES].string_value if ACCEPT_IMAGES in config.parameters else ""):
        return None
    try:
        return configure(config)
    except GraphkilnError:  # the image model is refused with the reason
        return None


def configure(tensor_model: ModelConfigProto) -> ModelConfigProto:
    """Make the configuration of a model's image model on this machine.

    Raises:
        RepositoryError: The model cannot have one.
    """
    wanted = max(_FEWEST_INSTANCES, min(_MOST_INSTANCES, usable_cores() // _CORES_PER_INSTANCE))
    return image_config(tensor_model, instances=wanted, has_gpu=bool(gpus()))


def describe_images(config: ModelConfigProto) -> str:
    """Describe the image model of a model, or why it has none."""
    try:
        taker = configure(config)
    except GraphkilnError as error:
        return f"not accepted: {error}"
    instances = taker.instance_group[0].count
    return f"{', '.join(FORMATS)} by {taker.name}, decoded in {instances} processes of {usable_cores()} threads each"


def asks_for_images(folder: Path) -> bool:
    """True if a model's configuration is readable and requests an image model."""
    with suppress(GraphkilnError):  # the model itself is refused
        parameters = read_config(folder / CONFIG_FILE).parameters
        return ACCEPT_IMAGES in parameters and accepts_images(parameters[ACCEPT_IMAGES].string_value)
    return False


@lru_cache(maxsize=4096)  # parsing takes a millisecond, and stores are scanned repeatedly
def _asks_as_stamped(folder: Path, _: str) -> bool:
    return asks_for_images(folder)


def _problem(stored: StoredModel, same_name: StoredModel | None) -> str:
    if same_name is None:
        return stored.problem
    return f"{same_name.folder} has the name of the image model of '{stored.name}': rename it"


@dataclass(kw_only=True, slots=True)
class ExplicitImages:
    """Load and unload image models with their tensor models in the user's explicit mode.

    Triton reads the user's stores, which contain no image models: they are in another repository, as placeholders while
    their tensor models are not loaded. A user who loads one by name then gets an error that names the model to load.

    Attributes:
        stores: The user's stores.
        mirror: The repository of image models.
        control: Repository control of the running server.
        load_timeout_s: Time limit for one load.
    """

    stores: Sequence[Path]
    mirror: Mirror
    control: RepositoryControl
    load_timeout_s: float
    _configs: dict[Path, tuple[int, bool]] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)  # tensor models with an image model in the mirror
    # Tensor model -> its versions, and modification time of its configuration, when its image model was loaded.
    _loaded: dict[str, tuple[tuple[int, ...], int]] = field(default_factory=dict)

    def takes_images(self, name: str) -> bool:
        """True if a model is an image model."""
        return name in map(image_model_name, self._shown)

    def follow(self, serving: Mapping[str, tuple[int, ...]]) -> None:
        """Load and unload image models according to the serving models.

        Raises:
            OSError: The server exited, or the stores cannot be read.
        """
        found = self._find()
        ended = self._loaded.keys() - (serving.keys() & found.keys())
        for name in ended:
            self.control.unload(image_model_name(name))
            del self._loaded[name]
        for name in self._shown - found.keys():
            self.mirror.remove(image_model_name(name))
        for name in found.keys() - (self._shown - ended):
            self._refuse(name, f"{image_model_name(name)} is loaded and unloaded with '{name}': load '{name}'")
        self._shown = {*found}
        for name in found.keys() & serving.keys():
            key = serving[name], self._configs[found[name]][0]
            if self._loaded.get(name) != key:
                self._loaded[name] = ((), 0)  # the next step tries again if Triton does not respond
                self._load(found[name], serving[name])
                self._loaded[name] = key

    def _find(self) -> dict[str, Path]:
        """Find the models that request an image model, and their folders."""
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

    def _load(self, folder: Path, versions: tuple[int, ...]) -> None:
        name = image_model_name(folder.name)
        try:
            config = configure(complete_config(folder, BACKEND_NAMES, lambda version: version, versions[-1], versions))
        except GraphkilnError as error:
            _log.error("%s is not served: %s", name, error)
            self._refuse(folder.name, str(error))
            return
        self.mirror.show_images(name, folder, versions, config)
        if problem := self.control.load(name, self.load_timeout_s):
            _log.error("%s could not be loaded: %s", name, problem)

    def _refuse(self, name: str, reason: str) -> None:
        self.mirror.refuse(image_model_name(name), {1: reason})
