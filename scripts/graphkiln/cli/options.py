"""Options and arguments shared by several verbs, and the models and stores that they name."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln_backend.engines.compute_limit import DEFAULT_COMPUTE_LIMIT_S
from graphkiln_backend.graph.errors import RepositoryError, ServerSetupError
from graphkiln_backend.graph.text import did_you_mean

if TYPE_CHECKING:
    from graphkiln_backend.repository.version import ModelVersion as StoredVersion

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
AsCsv = Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")]
ModelName = Annotated[str, typer.Option("--model", help="Model name.")]
ModelVersion = Annotated[str, typer.Option("--version", help="Model version.", show_default="the server's choice")]
ModelPath = Annotated[
    str, typer.Argument(help="STORE/NAME (newest version), or STORE/NAME/VERSION; also s3:// and others.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Override a setting of config.pbtxt, such as precision=bf16.", metavar="KEY=VALUE"),
]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder of lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]
ComputeLimit = Annotated[
    float,
    typer.Option("--compute-limit", help="Timeout in seconds for computing one batch.", metavar="S", min=0.1),
]
BackendDirectory = Annotated[
    Path | None,
    typer.Option(help="Folder of other Triton backends, as for `serve`.", metavar="DIR", exists=True, file_okay=False),
]
COMPUTE_LIMIT_S = DEFAULT_COMPUTE_LIMIT_S


def version_folder(path: Path) -> Path:
    """Resolve a path to a version folder: itself, the newest one of a model, or that of a graph file.

    Raises:
        RepositoryError: The path does not contain a version.
    """
    from graphkiln_backend.repository.version import newest_version
    from graphkiln_backend.repository.version_folders import is_version

    if path.is_file() and is_version(path.absolute().parent.name):
        path = path.absolute().parent
    return path if path.is_dir() and is_version(path.name) else newest_version(path)


def read_any_version(folder: Path) -> StoredVersion:
    """Read a version folder; without a manifest, its graph may be for any backend.

    Raises:
        RepositoryError: There is no graph, or its files differ from the manifest.
        ManifestError: The manifest or the golden samples cannot be read.
    """
    from graphkiln_backend.graph.manifest import MANIFEST_FILE
    from graphkiln_backend.repository.config import read_config
    from graphkiln_backend.repository.version import CONFIG_FILE, ModelVersion, find_served_graph, read_version

    if (folder / MANIFEST_FILE).exists():
        return read_version(folder)
    config = read_config(folder.parent / CONFIG_FILE)
    name = config.default_model_filename
    try:
        graph = find_served_graph(folder, backend=config.backend, platform=config.platform, default_filename=name)
    except RepositoryError:
        return read_version(folder, name)  # a graph of another framework, or a better error
    if graph.suffix in (".onnx", ".xml"):
        return read_version(folder, name or graph.name)
    return ModelVersion(graph_path=graph, manifest=None, golden=None)


@contextmanager
def local_path(path: str) -> Iterator[Path]:
    """Yield a local path of a model, version or graph; fetch remote ones (`s3://`) into a temporary folder.

    Raises:
        RepositoryError: The address is invalid, or nothing is there.
    """
    from graphkiln_backend.repository.remote_model import fetch_path
    from graphkiln_backend.storage.address import parse_store
    from graphkiln_backend.system.owned_folder import OwnedFolder

    place = parse_store(path)
    if isinstance(place, Path):
        yield place
        return
    with OwnedFolder(prefix="graphkiln-fetched-") as temporary:
        yield fetch_path(place, temporary.path)


@contextmanager
def open_stores(paths: Sequence[Path]) -> Iterator[list[Path]]:
    """Open model stores: folders of models as they are, others linked into a temporary store.

    Linked are single models, and the models of a `config.json` of OpenVINO Model Server.

    Raises:
        ServerSetupError: A path is not one of these, or a folder that this user may not open.
        RepositoryError: A `config.json` cannot be met.
    """
    from graphkiln_backend.repository.ovms import read_ovms
    from graphkiln_backend.repository.stores import model_at
    from graphkiln_backend.system.owned_folder import OwnedFolder

    for path in paths:
        _check_readable(path)
    listed = {path: found for path in paths if (found := read_ovms(path))}
    models = {path: model for path in paths if path not in listed and (model := model_at(path))}
    stores = [path for path in paths if path not in models and path not in listed]
    for store in stores:
        _check_store(store)
    if not models and not listed:
        yield stores
        return
    with OwnedFolder() as temporary:
        for number, each in enumerate(listed.values()):
            linked = temporary.path / str(number)
            linked.mkdir()
            each.link(linked)
            stores.append(linked)
        if not models:
            yield stores
            return
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
    if store.suffix == ".xml" and store.is_file():
        raise ServerSetupError(
            f"{store} is a graph, not a model store",
            hint=f"copy it and its .bin to models/{store.stem}/1/, then serve models",
        )
    if store.suffix == ".onnx" and store.is_file():
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
