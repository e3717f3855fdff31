"""The models beside others that take encoded images for them: found in the stores, planned, configured.

Such a model has no files of its own. It comes and goes with the model whose images it takes, and has the versions that
are served of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.preprocess import ACCEPT_IMAGES, accepts_images, image_model_name
from graphkiln_backend.images.formats import FORMATS
from graphkiln_backend.repository.config import ModelConfigProto, read_config
from graphkiln_backend.repository.image_config import image_config, publish_image_model
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.system.resources import usable_cores

# Two, so that one decodes while the other waits for the session; more where many cores decode for a GPU. Each takes as
# many threads as there are cores, and some 70 MB.
_FEWEST_INSTANCES, _MOST_INSTANCES = 2, 4
_CORES_PER_INSTANCE = 4


def add_image_models(found: Mapping[str, StoredModel]) -> dict[str, StoredModel]:
    """The models of stores, and after them those that take images for some of them.

    Args:
        found: By name, as scanned.
    """
    takers = {
        image_model_name(name): replace(
            stored, tensor_model=name, problem=_problem(stored, found.get(image_model_name(name)))
        )
        for name, stored in found.items()
        if _asks_as_stamped(stored.folder, stored.stamp)
    }
    return {**found, **takers}


def complete_pair(config: ModelConfigProto) -> None:
    """Says in a model's configuration which model takes its images, if it accepts and can have any.

    Args:
        config: Complete; changed in place.
    """
    if find_taker(config) is not None:
        publish_image_model(config)


def find_taker(config: ModelConfigProto) -> ModelConfigProto | None:
    """The configuration of the model that takes a model's images; None where nobody asks for it, or it cannot be.

    Args:
        config: Of the model that takes tensors, complete.
    """
    if not accepts_images(config.parameters[ACCEPT_IMAGES].string_value if ACCEPT_IMAGES in config.parameters else ""):
        return None
    try:
        return configure(config)
    except GraphkilnError:  # the model that takes the images is refused, and says why
        return None


def configure(tensor_model: ModelConfigProto) -> ModelConfigProto:
    """The configuration of the model that takes a model's images, on this machine.

    Raises:
        RepositoryError: The model takes none.
    """
    wanted = max(_FEWEST_INSTANCES, min(_MOST_INSTANCES, usable_cores() // _CORES_PER_INSTANCE))
    return image_config(tensor_model, instances=wanted, has_gpu=bool(gpus()))


def describe_images(config: ModelConfigProto) -> str:
    """How a model that asks for it takes encoded images on this machine, or why it takes none.

    Args:
        config: Of the model that takes tensors, complete.
    """
    try:
        return _in_words(configure(config))
    except GraphkilnError as error:
        return f"none are taken: {error}"


def _in_words(taker: ModelConfigProto) -> str:
    instances = taker.instance_group[0].count
    return f"{', '.join(FORMATS)} by {taker.name}, decoded in {instances} processes of {usable_cores()} threads each"


def asks_for_images(folder: Path) -> bool:
    """Whether a model's configuration asks for a model that takes its images; one that cannot be read does not."""
    with suppress(GraphkilnError):  # it is refused for that itself
        parameters = read_config(folder / CONFIG_FILE).parameters
        return ACCEPT_IMAGES in parameters and accepts_images(parameters[ACCEPT_IMAGES].string_value)
    return False


@lru_cache(maxsize=4096)  # a configuration takes a millisecond to parse, and stores are looked at again and again
def _asks_as_stamped(folder: Path, _: str) -> bool:
    return asks_for_images(folder)


def _problem(stored: StoredModel, same_name: StoredModel | None) -> str:
    if same_name is None:
        return stored.problem
    return f"{same_name.folder} has the name of the model that takes the images of '{stored.name}': rename it"
