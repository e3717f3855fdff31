"""The version that a path means, where a command takes a model's folder, too."""

from __future__ import annotations

from pathlib import Path


def version_folder(path: Path) -> Path:
    """A version folder, or the newest one of a model's folder; of a version's graph, the folder that it lies in.

    Raises:
        RepositoryError: There is none.
    """
    from graphkiln_backend.repository.version import newest_version
    from graphkiln_backend.repository.version_folders import is_version

    if path.is_file() and is_version(path.absolute().parent.name):
        path = path.absolute().parent
    return path if path.is_dir() and is_version(path.name) else newest_version(path)
