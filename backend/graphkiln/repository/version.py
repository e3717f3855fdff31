"""A version folder of a model repository: `NAME/VERSION/{model.onnx,manifest.json,golden.npz}`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from graphkiln.graph.errors import RepositoryError
from graphkiln.graph.golden import GoldenSamples
from graphkiln.graph.manifest import MANIFEST_FILE, Manifest, sha256_of

GRAPH_FILE = "model.onnx"
GOLDEN_FILE = "golden.npz"
LABELS_FILE = "labels.txt"
CONFIG_FILE = "config.pbtxt"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """A saved graph and what is known about it.

    Attributes:
        graph_path: The graph file.
        manifest: Its manifest, or None for a graph that came without one.
        golden: Its golden samples, or None.
    """

    graph_path: Path
    manifest: Manifest | None
    golden: GoldenSamples | None


def read_version(folder: Path) -> ModelVersion:
    """Reads a version folder and checks that its files are the ones that the manifest speaks of.

    Raises:
        RepositoryError: The graph file is missing, or a file's SHA-256 is not the manifest's.
        ManifestError: The manifest or the golden samples cannot be read.
    """
    manifest_path = folder / MANIFEST_FILE
    if not manifest_path.exists():
        return ModelVersion(graph_path=_existing(folder / GRAPH_FILE), manifest=None, golden=None)
    manifest = Manifest.read(manifest_path)
    graph_path = _unchanged(folder / manifest.graph_file, manifest.sha256)
    golden = None
    if manifest.golden:
        golden = GoldenSamples.read(_unchanged(folder / manifest.golden.file, manifest.golden.sha256))
    return ModelVersion(graph_path=graph_path, manifest=manifest, golden=golden)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise RepositoryError(f"there is no {path.name} in {path.parent}", hint="a version folder holds a saved graph")
    return path


def _unchanged(path: Path, sha256: str) -> Path:
    found = sha256_of(_existing(path))
    if found != sha256:
        raise RepositoryError(
            f"{path} is not the file that {MANIFEST_FILE} describes: "
            f"expected SHA-256 {sha256[:12]}..., got {found[:12]}...",
            hint="restore the file or convert the model again",
        )
    return path
