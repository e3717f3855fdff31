"""The model stores of `serve`: folders of models, and single models that are named as such."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.repository.stores import model_at
from graphkiln_backend.system.owned_folder import OwnedFolder

_GRAPH_SUFFIX = ".onnx"


@contextmanager
def open_stores(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Open model stores: folders of models as they are, and single models linked into a temporary store.

    Raises:
        ServerSetupError: A path is not one of these, or a folder that this user may not open.
    """
    for path in paths:
        _check_readable(path)
    models = {path: model for path in paths if (model := model_at(path))}
    stores = [path for path in paths if path not in models]
    for store in stores:
        _check_store(store)
    if not models:
        yield stores
        return
    with OwnedFolder() as temporary:
        chosen = temporary.path / "store"
        chosen.mkdir()
        for model in dict.fromkeys(models.values()):
            link = chosen / model.name
            if link.is_symlink():
                raise ServerSetupError(f"two models are named {model.name}: {link.readlink()} and {model}")
            link.symlink_to(model)
        yield [*stores, chosen]


def _check_readable(path: Path) -> None:
    if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
        raise ServerSetupError(
            f"model store '{path}' cannot be read by user {os.geteuid()}",
            hint=f"chmod -R a+rX {path}, or serve as its owner; in a container: docker run --user UID:GID",
        )


def _check_store(store: Path) -> None:
    if store.is_dir():
        return
    if store.suffix == _GRAPH_SUFFIX and store.is_file():
        raise ServerSetupError(
            f"{store} is a graph, not a model store",
            hint=f"graphkiln convert {store} --model-store models proves it; or copy it to "
            f"models/{store.stem}/1/model.onnx; then serve models",
        )
    near = [path.name for path in store.parent.iterdir() if path.is_dir()] if store.parent.is_dir() else []
    hint = did_you_mean(store.name, near, prefix=f"{store.parent}/", otherwise="name a folder of models")
    raise ServerSetupError(
        f"model store '{store}' is {'not a folder' if store.exists() else 'missing'}", hint=f"{hint}: --model-store DIR"
    )
