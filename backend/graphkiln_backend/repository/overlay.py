"""Model stores as Triton should see them: the user's files by links, every config.pbtxt complete.

Triton can complete configurations itself, but starts one more process for every model version to do it, which costs at
least a second each. With complete configurations it need not. The user's folders are never written to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.batch_guard import guard_batch
from graphkiln_backend.repository.config import (
    BACKEND,
    DROP_IN_BACKEND,
    DROP_IN_PLATFORM,
    ModelConfigProto,
    complete,
    read_config,
    write_config,
)
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import CONFIG_FILE, find_labels_file, newest_version, read_version_signature

GraphFolder = Callable[[Path], Path]
"""Version folder -> the folder that holds its graph: itself, unless another framework saved it."""


def build_overlay(
    stores: Sequence[Path], folder: Path, backends: frozenset[str], graph_folder: GraphFolder
) -> list[Path]:
    """Mirrors stores with complete configurations.

    Args:
        stores: The user's model stores.
        folder: Where to build the mirrors; made when missing.
        backends: Names under which our backend is installed.
        graph_folder: Finds the graph of a version.

    Returns:
        One mirror per store.

    Raises:
        GraphkilnError: A model is not ours, or cannot be completed.
        OSError: The mirrors cannot be written.
    """
    mirrors = []
    for index, store in enumerate(stores):
        mirror = folder / str(index)
        mirror.mkdir(parents=True)
        for model in sorted(path for path in store.iterdir() if path.is_dir() and not path.name.startswith(".")):
            _mirror_model(model, mirror / model.name, backends, graph_folder)
        mirrors.append(mirror)
    return mirrors


def batch_footprints(mirrors: Sequence[Path]) -> list[int]:
    """Bytes of all inputs and outputs of a largest batch, once per instance of every model.

    Dimensions that vary count as 1, texts as nothing: a lower bound.

    Args:
        mirrors: Stores with complete configurations.
    """
    footprints = []
    for path in sorted(path for mirror in mirrors for path in mirror.glob(f"*/{CONFIG_FILE}")):
        config = ModelConfig.read(path, has_gpu=False)  # on a CPU there are at least as many instances as on a GPU
        footprints += [config.batch_bytes] * config.instances
    return footprints


def complete_config(model: Path, backends: frozenset[str], graph_folder: GraphFolder) -> ModelConfigProto:
    """A model's configuration, completed from the graph of its newest version.

    Args:
        model: The model's folder.
        backends: Names under which our backend is installed.
        graph_folder: Finds the graph of a version.

    Raises:
        RepositoryError: The configuration or the graph is not usable, or the model is of another backend.
        ManifestError: The manifest cannot be read.
    """
    config = read_config(model / CONFIG_FILE)
    config.name = config.name or model.name
    if not config.backend and (config.platform == DROP_IN_PLATFORM or not config.platform):
        config.backend = DROP_IN_BACKEND if DROP_IN_BACKEND in backends else BACKEND
    if config.backend not in backends:
        raise RepositoryError(f"model '{model.name}' is of backend '{config.backend or config.platform}'")
    newest = graph_folder(newest_version(model))
    signature = read_version_signature(newest, config.default_model_filename)
    complete(config, signature, labels_file=find_labels_file(model))
    return config


def _mirror_model(model: Path, mirror: Path, backends: frozenset[str], graph_folder: GraphFolder) -> None:
    config = complete_config(model, backends, graph_folder)
    guard_batch(config)
    mirror.mkdir()
    for entry in model.iterdir():
        if entry.name != CONFIG_FILE:
            (mirror / entry.name).symlink_to(entry.absolute())
    write_config(config, mirror / CONFIG_FILE)
