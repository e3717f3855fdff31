"""Paths of verbs that read: of this machine, or fetched from a remote store for as long as they are looked at."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def local_path(path: str) -> Iterator[Path]:
    """A path of this machine; what lies on `s3://` and its like is fetched into a temporary folder.

    Args:
        path: A model, a version, or a graph.

    Raises:
        RepositoryError: It is an address, but none that is known, or there is nothing.
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
