"""One version of a model in a remote store, fetched to be looked at."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.repository.remote_address import RemoteAddress
from graphkiln_backend.repository.remote_files import RemoteFiles, RemoteStoreError
from graphkiln_backend.repository.version_folders import version_number


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
        raise RemoteStoreError(f"there is no model at {address}", hint="STORE/NAME, or STORE/NAME/VERSION")
    model = folder / files.address.root.rpartition("/")[2]
    for path in wanted:
        (model / path).parent.mkdir(parents=True, exist_ok=True)
        files.fetch(path, model / path)
    return model / version
