"""The user's stores as Triton sees them in the user's explicit mode: as they are, but for single models at times."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path

from graphkiln_backend.server.mirror import Mirror


class StoreView:
    """Links to stores, which lead elsewhere while some models are shown as a mirror has them.

    What is loaded keeps its path: an instance never notices.

    Args:
        folder: Where the links lie; made when missing.
        stores: The user's stores.
        mirror: Holds the models that are shown otherwise.

    Attributes:
        paths: What Triton is given, one for each store.
    """

    def __init__(self, folder: Path, stores: Sequence[Path], mirror: Mirror) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = [folder / str(index) for index in range(len(stores))]
        self._stores = [store.absolute() for store in stores]
        self._mirror = mirror
        self._numbers = count()

    def show_mirrored(self, models: Collection[str]) -> None:
        """Shows these models as the mirror has them, and everything else as it is.

        Raises:
            OSError: The links cannot be written.
        """
        for path, store in zip(self.paths, self._stores, strict=True):
            before = path.readlink() if path.is_symlink() else store
            _relink(path, self._mixture(path, store, models) if models else store)
            if before.parent == path.parent:
                shutil.rmtree(before)

    def _mixture(self, path: Path, store: Path, models: Collection[str]) -> Path:
        folder = self._new_folder(path)
        for entry in store.iterdir():
            mirrored = self._mirror.path / entry.name
            shown = mirrored if entry.name in models and mirrored.exists() else entry
            (folder / entry.name).symlink_to(shown)
        return folder

    def _new_folder(self, path: Path) -> Path:
        folder = next(
            each for number in self._numbers if not (each := path.with_name(f"{path.name}.{number}")).exists()
        )
        folder.mkdir()
        return folder


def _relink(link: Path, target: Path) -> None:
    """Has a link lead elsewhere, in one step."""
    new = link.with_name(f"{link.name}.next")
    new.symlink_to(target)
    new.replace(link)
