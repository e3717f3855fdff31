"""A store with one version of a model and another configuration: what a trial serves. The user's files are linked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from graphkiln.tuning.subject import Subject
from graphkiln_backend.repository.config import read_config
from graphkiln_backend.repository.config_changes import ConfigChanges
from graphkiln_backend.repository.overlay import copy_labels, write_mirror
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.system.owned_folder import OwnedFolder

PREFIX = "graphkiln-tune-"
"""Begins the names of the temporary folders."""


@contextmanager
def stage(subject: Subject, changes: ConfigChanges, version: Path | None = None) -> Iterator[Path]:
    """A store that lives as long as the context.

    Args:
        subject: The model; its folder is only read.
        changes: To its configuration.
        version: Folder of a version that stands in the place of the subject's; None for its own.

    Raises:
        RepositoryError: The configuration cannot be changed so.
    """
    config = read_config(subject.folder / CONFIG_FILE)
    changes.apply(config)
    config.ClearField("version_policy")  # the version that is tuned is the only one there
    with OwnedFolder(prefix=PREFIX) as folder:
        store = folder.path / "store"
        model = store / subject.name
        write_mirror(subject.folder, model, [] if version else [subject.version], config)
        if version:
            (model / str(subject.version)).symlink_to(version)
            copy_labels(subject.folder, model, config)
        yield store
