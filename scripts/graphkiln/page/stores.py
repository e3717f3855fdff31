"""What the model stores hold of versions that are served: proofs and golden samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Manifest
from graphkiln_backend.graph.text import fault_in_served_name
from graphkiln_backend.repository.version import read_manifest
from graphkiln_backend.repository.version_folders import is_version

_SHOWN = ("sha256", "digest", "verification", "weights")
_HIDDEN = {"..", "."}


class Stores:
    """Reads the folders that a server serves from.

    Args:
        folders: Of models.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders

    def manifest(self, model: str, version: str) -> Manifest | None:
        """The manifest of a version; None where it has none, or is not in these stores.

        Raises:
            ManifestError: It is damaged.
        """
        folder = self._find(model, version)
        return read_manifest(folder) if folder else None

    def proof(self, model: str, version: str) -> dict[str, Any] | None:
        """What a version's manifest proves, as plain data; None as above.

        Not the recipe nor the command: they name folders of the machine that converted the model.

        Raises:
            ManifestError: The manifest is damaged.
        """
        manifest = self.manifest(model, version)
        if manifest is None:
            return None
        facts: Mapping[str, Any] = encode(manifest)
        provenance = {key: facts["provenance"][key] for key in ("source", "versions", "metrics")}
        return {**{key: facts[key] for key in _SHOWN}, "provenance": provenance, **_conversion(manifest)}

    def golden(self, model: str, version: str) -> GoldenSamples | None:
        """The golden samples of a version; None where it has none.

        Raises:
            ManifestError: They are damaged.
        """
        folder, manifest = self._find(model, version), self.manifest(model, version)
        if folder is None or manifest is None or manifest.golden is None:
            return None
        return GoldenSamples.read(folder / manifest.golden.file)

    def _find(self, model: str, version: str) -> Path | None:
        """The folder of a version, whose name comes from a URL."""
        if fault_in_served_name(model) or model in _HIDDEN or not is_version(version):
            return None
        candidates = (store / model / version for store in self._folders)
        return next((folder for folder in candidates if folder.is_dir()), None)


def _conversion(manifest: Manifest) -> dict[str, Any]:
    made = manifest.conversion
    return {"notes": list(made.notes), "output_errors": dict(made.output_errors)} if made else {}
