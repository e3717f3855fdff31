"""Importers: convert a graph that another framework saved into a version when it is served.

Importers live in the converters package or in third-party packages and are discovered through the entry-point group
`graphkiln.importers`, so that the backend never imports a converter.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

GROUP = "graphkiln.importers"

_log = logging.getLogger("graphkiln.repository")


class Importer(Protocol):
    """Converter for the saved graphs of one framework. Its module must be cheap to import: every server start does."""

    @property
    def kind(self) -> str:
        """Kind of the source in `graphkiln convert KIND:DIR`; also the kind of its entries in the artifact cache."""
        ...

    @property
    def framework(self) -> str:
        """Display name of the framework."""
        ...

    @property
    def distributions(self) -> tuple[str, ...]:
        """Installed distributions that the result depends on; another release invalidates cached conversions."""
        ...

    def find_saved(self, version: Path) -> Path | None:
        """Return the folder that the framework saved inside a version folder, or None."""
        ...

    def convert(self, saved: Path, target: Path) -> None:
        """Convert a saved graph and verify the result.

        Args:
            saved: Folder returned by `find_saved`; must not be modified.
            target: An empty folder, to become a version folder.

        Raises:
            ConversionError: The graph cannot be converted.
            VerificationError: The outputs of the converted graph differ.
        """
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignGraph:
    """A graph that another framework saved, and its importer."""

    saved: Path
    importer: Importer


def find_foreign_graph(version: Path) -> ForeignGraph | None:
    """Find a graph that another framework saved in a version folder, or return None."""
    for importer in load_importers():
        if saved := importer.find_saved(version):
            return ForeignGraph(saved=saved, importer=importer)
    return None


def load_importers() -> list[Importer]:
    """Load the installed importers, sorted by name. Importers that fail to import are logged and skipped."""
    from importlib.metadata import entry_points  # rarely needed: most versions hold an ONNX graph

    importers = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: entry.name):
        try:
            importers.append(entry.load()())
        except ImportError as error:
            _log.warning("cannot load the importer '%s': %s", entry.name, error)
    return importers
