"""One version of a model in a remote store, or one file, fetched to be looked at."""

from __future__ import annotations

from collections.abc import Collection, Set
from pathlib import Path, PurePosixPath

from graphkiln_backend.repository.onnx_file import external_files
from graphkiln_backend.repository.remote_address import RemoteAddress, RemoteStoreError
from graphkiln_backend.repository.remote_files import RemoteFiles
from graphkiln_backend.repository.version_folders import is_version, version_number

_GRAPH_SUFFIX = ".onnx"


def fetch_path(address: RemoteAddress, folder: Path) -> Path:
    """Fetches what an address names: a model, a version of it, or a graph by itself.

    Args:
        address: `STORE/NAME`, `STORE/NAME/VERSION`, the graph of one, or any `FILE.onnx`.
        folder: Where to put it.

    Returns:
        The model's folder, the version's, or the file.

    Raises:
        RemoteStoreError: There is nothing, or it cannot be read.
    """
    if not address.root.endswith(_GRAPH_SUFFIX):
        return fetch_model(address, folder)
    above, _ = address.split()
    in_version = is_version(above.root.rpartition("/")[2])
    return fetch_model(above, folder) if in_version else fetch_file(address, folder)


def fetch_file(address: RemoteAddress, folder: Path) -> Path:
    """Fetches one file; of a graph, the files of its weights, too.

    Args:
        address: Of the file.
        folder: Where to put it.

    Returns:
        The file.

    Raises:
        RemoteStoreError: It cannot be read.
        RepositoryError: It is named like a graph and is none.
    """
    above, name = address.split()
    files = RemoteFiles(above)
    path = folder / name
    files.fetch(name, path)
    for weights in external_files(path) if path.suffix == _GRAPH_SUFFIX else ():
        if ".." not in PurePosixPath(weights).parts and not weights.startswith("/"):  # else its reader refuses them
            (folder / weights).parent.mkdir(parents=True, exist_ok=True)
            files.fetch(weights, folder / weights)
    return path


def fetch_model(address: RemoteAddress, folder: Path) -> Path:
    """Fetches a model's newest version, or the version that is named, and what lies beside its versions.

    Args:
        address: `STORE/NAME`, or `STORE/NAME/VERSION`.
        folder: Where to put it.

    Returns:
        The model's folder, or the version's.

    Raises:
        RemoteStoreError: There is no such model, or it cannot be read.
    """
    above, name = address.split()
    version = name if version_number(name) is not None else ""
    files = RemoteFiles(above if version else address)
    listing = files.list()
    numbers = {path: version_number(path.partition("/")[0]) for path in listing if "/" in path}
    chosen = version or str(max((number for number in numbers.values() if number is not None), default=""))
    wanted = [path for path in listing if numbers.get(path) is None or path.startswith(f"{chosen}/")]
    if not any(path.startswith(f"{chosen}/") for path in wanted):
        there = {number for number in numbers.values() if number is not None}
        raise _absent(address, above.root.rpartition("/")[2], there)
    model = folder / files.address.root.rpartition("/")[2]
    for path in wanted:
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        files.fetch(path, model / path)
    return model / version


def is_model(listing: Collection[str]) -> bool:
    """Whether the files of a folder are those of a model, or of one version of it, rather than of a store.

    Args:
        listing: Their paths in it.
    """
    models = {path.partition("/")[0] for path in listing if "/" in path}
    return "config.pbtxt" in listing or (bool(models) and all(map(is_version, models)))


def _absent(address: RemoteAddress, model: str, there: Set[int]) -> RemoteStoreError:
    """What is wrong with an address at which no version is.

    Args:
        address: `STORE/NAME/VERSION`, or `STORE/NAME`, which has none.
        model: Name of the model.
        there: Its versions.
    """
    if there:
        told = ", ".join(map(str, sorted(there)))
        return RemoteStoreError(f"{address}: model '{model}' has no such version", hint=f"it has {told}")
    return RemoteStoreError(f"there is no model at {address}", hint="STORE/NAME, or STORE/NAME/VERSION")
