"""Importers: what turns a graph that another framework saved into a version, when it is served.

They stand with the converters, or with a third party, and are found through the entry-point group
`graphkiln.importers`: nothing in the backend imports a converter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

GROUP = "graphkiln.importers"

_log = logging.getLogger("graphkiln.repository")


class Importer(Protocol):
    """Converts what one framework saved. Importing its module must be cheap: servers load it at every start."""

    @property
    def kind(self) -> str:
        """The source's kind, as in `graphkiln convert KIND:DIR`; also that of its entries in the artifact cache."""
        ...

    @property
    def framework(self) -> str:
        """The framework's name, for people."""
        ...

    @property
    def distributions(self) -> tuple[str, ...]:
        """The installed distributions that the result depends on: another release makes another version."""
        ...

    def find_saved(self, version: Path) -> Path | None:
        """The folder that the framework saved into a version folder; None where it saved none."""
        ...

    def convert(self, saved: Path, target: Path) -> None:
        """Convert and proves a saved graph.

        Args:
            saved: What `find_saved` found; never written to.
            target: An empty folder, which becomes a version folder.

        Raises:
            ConversionError: It cannot be converted.
            VerificationError: The outputs changed.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignGraph:
    """A graph that another framework saved: its folder, and what converts it."""

    saved: Path
    importer: Importer


def find_foreign_graph(version: Path) -> ForeignGraph | None:
    """The graph that another framework saved into a version folder, or None."""
    for importer in load_importers():
        if saved := importer.find_saved(version):
            return ForeignGraph(saved=saved, importer=importer)
    return None


def load_importers() -> list[Importer]:
    """All importers that are installed, by name; one that cannot be imported is logged and left out."""
    from importlib.metadata import entry_points  # most starts find a graph of ours

    importers = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            importers.append(entry.load()())
        except ImportError as error:
            _log.warning("the importer '%s' cannot be loaded: %s", entry.name, error)
    return importers
