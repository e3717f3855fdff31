"""A version folder of a model repository: `NAME/VERSION/{model.onnx,manifest.json,golden.npz}`.

Instead of an ONNX graph it may hold one in OpenVINO IR: `model.xml` with its weights in `model.bin`.
"""

from __future__ import annotations

import enum
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.files import GIB, GRAPH_LIMIT, TEXT_LIMIT, read_bytes, stamp_of
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import MANIFEST_FILE, Adoption, Labels, Manifest, sha256_of
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.task import Ranking, Reading, check_task, class_output, is_classification, read_labels
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.repository import openvino_ir
from graphkiln_backend.repository.importers import find_foreign_graph
from graphkiln_backend.repository.onnx_file import known_sha256, read_signature
from graphkiln_backend.repository.version_folders import version_folders

GRAPH_FILE = "model.onnx"
IR_FILE = "model.xml"
GOLDEN_FILE = "golden.npz"
LABELS_FILE = "labels.txt"
_GOLDEN_LIMIT = 4 * GIB
CONFIG_FILE = "config.pbtxt"


class GraphFormat(enum.StrEnum):
    """Format of a graph's file, by its name for people."""

    ONNX = "ONNX"
    OPENVINO_IR = openvino_ir.FORMAT


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelVersion:
    """A saved graph and its metadata.

    Attributes:
        graph_path: The graph file.
        manifest: None for a bare graph.
        golden: Golden samples, or None.
        contract: Preprocessing, labels, ranking and task.
    """

    graph_path: Path
    manifest: Manifest | None
    golden: GoldenSamples | None
    contract: Contract = field(default_factory=Contract)

    @property
    def format(self) -> GraphFormat:
        """Format of the graph."""
        return format_of(self.graph_path)

    @property
    def adoption(self) -> Adoption | None:
        """Origin of the golden samples of a graph that another tool wrote, or None."""
        return self.manifest.adoption if self.manifest else None

    @property
    def ranking(self) -> Ranking | None:
        """Outputs of an embedded top-k, or None."""
        return self.manifest.ranking if self.manifest else None

    @property
    def reading(self) -> Reading | None:
        """Ranking or task of the manifest, or None."""
        return self.manifest.ranking or self.manifest.task if self.manifest else None

    def stamp(self) -> tuple[int, ...]:
        """Size (bytes) and modification time (ns) of the graph, to detect changes; in OpenVINO IR also of its weights.

        Raises:
            OSError: The graph is missing.
        """
        status = self.graph_path.stat()
        weights = stamp_of(openvino_ir.weights_of(self.graph_path)) if self.format is GraphFormat.OPENVINO_IR else ()
        return status.st_size, status.st_mtime_ns, *weights


def format_of(graph: Path) -> GraphFormat:
    """Return the format of a graph, which its name tells."""
    return GraphFormat.OPENVINO_IR if openvino_ir.is_ir(graph) else GraphFormat.ONNX


def read_graph_signature(graph: Path) -> Signature:
    """Read inputs and outputs of a graph in any format.

    Raises:
        RepositoryError: A file is missing or damaged.
        ManifestError: Triton does not support an element type.
    """
    is_ir = format_of(graph) is GraphFormat.OPENVINO_IR
    return openvino_ir.read_ir(graph).signature if is_ir else read_signature(graph)


def find_graph(folder: Path, default_filename: str = "") -> Path:
    """Find the graph file of a version folder.

    It is `default_filename` (a file or a folder that holds a graph) or `model.onnx`, else `model.xml` in OpenVINO IR,
    or the only graph in that format, which has any name for OpenVINO Model Server.

    Args:
        folder: The version folder.
        default_filename: `default_model_filename` of the configuration; may be empty.

    Raises:
        RepositoryError: There is no graph, or the path is outside the version folder.
    """
    found = () if default_filename or (folder / GRAPH_FILE).exists() else find_ir(folder)
    if len(found) > 1:
        raise RepositoryError(
            f"{folder} holds several graphs: {', '.join(path.name for path in found)}",
            hint=f'name one in config.pbtxt: default_model_filename: "{found[0].name}"',
        )
    path = found[0] if found else folder / (default_filename or GRAPH_FILE)
    if path.is_dir():
        path = path / GRAPH_FILE
    if ".." in Path(default_filename).parts or Path(default_filename).is_absolute():
        raise RepositoryError(f"default_model_filename '{default_filename}' is outside the version folder")
    return _check_exists(path)


# Files of a backend in a version folder, by its name and that of its platform, in the order of preference. Source: the
# model repository page of Triton's user guide.
_GRAPH_FILES = {
    **dict.fromkeys(("onnxruntime", "onnxruntime_onnx"), (GRAPH_FILE,)),
    **dict.fromkeys(("tensorrt", "tensorrt_plan"), ("model.plan",)),
    **dict.fromkeys(("pytorch", "pytorch_libtorch"), ("model.pt", "model.pt2")),
    "openvino": (IR_FILE,),
    "python": ("model.py",),
}


def find_served_graph(folder: Path, *, backend: str, platform: str, default_filename: str) -> Path:
    """Find the file of a version that its backend loads, for any backend of Triton.

    Args:
        folder: The version folder.
        backend: `backend` of the configuration; may be empty.
        platform: `platform` of the configuration; may be empty.
        default_filename: As for `find_graph`.

    Raises:
        RepositoryError: There is no such file, several could be meant, or the path is outside the version folder.
    """
    if default_filename or backend == "graphkiln":
        return find_graph(folder, default_filename)
    names = _GRAPH_FILES.get(backend) or _GRAPH_FILES.get(platform)
    known = dict.fromkeys(names or (name for files in _GRAPH_FILES.values() for name in files))
    found = [folder / name for name in known if (folder / name).is_file()]
    if not found and (not names or IR_FILE in names):
        found = list(find_ir(folder))  # of another name
    if names and len(found) != 1:  # of one backend: its preference, or the error about its first file
        return find_graph(folder, found[0].name if found else names[0])
    if len(found) != 1:
        which = f"{' and '.join(path.name for path in found)} are" if found else f"none of {', '.join(known)} is"
        raise RepositoryError(f"{which} in {folder}", hint="name the graph: default_model_filename in config.pbtxt")
    return found[0]


def find_ir(folder: Path) -> tuple[Path, ...]:
    """Find the graphs of a version folder in OpenVINO IR: `model.xml`, or else those with weights, or else any."""
    found = sorted(folder.glob(f"*{openvino_ir.SUFFIX}"))
    named = [path for path in found if path.name == IR_FILE]
    return tuple(named or [path for path in found if openvino_ir.weights_of(path).is_file()] or found)


def holds_ir(folder: Path, default_filename: str = "") -> bool:
    """Return true if the graph of a version folder is in OpenVINO IR; arguments as for `find_graph`."""
    if default_filename:
        return openvino_ir.is_ir(Path(default_filename))
    return not (folder / GRAPH_FILE).exists() and bool(find_ir(folder))


def has_own_graph(folder: Path) -> bool:
    """Return true if a version folder holds a graph or a manifest."""
    return (folder / MANIFEST_FILE).exists() or (folder / GRAPH_FILE).exists() or bool(find_ir(folder))


def claims_proof(folder: Path) -> bool:
    """Return true if a version folder holds a manifest or golden samples: a half-copied one must not count as bare.

    Other tools write files named `manifest.json`, too.
    """
    if (folder / GOLDEN_FILE).exists():
        return True
    try:
        return b'"graph_file"' in read_bytes(folder / MANIFEST_FILE, TEXT_LIMIT)
    except FileNotFoundError:
        return False
    except OSError:  # reported by the proof
        return True


def needs_graph_facts(folder: Path) -> bool:
    """Return true if facts must be read from the graph, since the manifest is missing or does not hold them."""
    if not (folder / GRAPH_FILE).is_file():
        return False
    try:
        manifest = json.loads(read_bytes(folder / MANIFEST_FILE, TEXT_LIMIT))
    except FileNotFoundError:
        return True
    except (OSError, ValueError, RecursionError):  # reported by `read_manifest`
        return False
    return isinstance(manifest, dict) and not manifest.get("conversion")


# Number of models listed in a hint.
_NAMED = 20


def newest_version(model: Path) -> Path:
    """Return the version folder with the highest number.

    Raises:
        RepositoryError: There is no version.
    """
    if model.is_file():
        raise RepositoryError(
            f"{model} is a file, expected the folder of a model",
            hint=f"convert it: graphkiln convert {model}" if model.suffix == ".onnx" else "name the folder",
        )
    if not model.is_dir():
        near = [path.name for path in model.parent.iterdir() if path.is_dir()] if model.parent.is_dir() else []
        hint = did_you_mean(
            model.name, near, prefix=f"{model.parent}/", otherwise="name a model: model_repository/NAME"
        )
        raise RepositoryError(f"there is no file or folder {model}", hint=hint)
    versions = version_folders(model.iterdir())
    if not versions:
        # Hidden folders belong to conversions in progress and may disappear.
        folders = [path for path in sorted(model.iterdir()) if not path.name.startswith(".") and path.is_dir()]
        if models := [path.name for path in folders if version_folders(path.iterdir())]:
            names = ", ".join(models[:_NAMED])
            raise RepositoryError(f"{model} is a model store, not a model", hint=f"name one of its models: {names}")
        name = model.resolve().name
        raise RepositoryError(f"model '{name}' has no version folder", hint=f"make {name}/1/{GRAPH_FILE}")
    return versions[max(versions)]


def find_labels_file(model: Path) -> str | None:
    """Return the name of the labels file in a model's folder, or None."""
    return LABELS_FILE if (model / LABELS_FILE).is_file() else None


def read_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a version folder, or return None.

    Raises:
        ManifestError: The manifest cannot be read.
    """
    path = folder / MANIFEST_FILE
    return Manifest.read(path) if path.exists() else None


def read_version_signature(folder: Path, default_filename: str = "") -> Signature:
    """Read the signature of a version from its manifest, or from the graph if there is none. Hashes are not checked.

    Args:
        folder: The version folder.
        default_filename: As for `find_graph`.

    Raises:
        RepositoryError: The graph is missing or damaged.
        ManifestError: The manifest cannot be read.
    """
    manifest = read_manifest(folder)
    return manifest.signature if manifest else read_graph_signature(find_graph(folder, default_filename))


def read_version(folder: Path, default_filename: str = "") -> ModelVersion:
    """Read a version folder and check its files against the hashes of the manifest.

    Args:
        folder: The version folder.
        default_filename: As for `find_graph`; ignored if there is a manifest.

    Raises:
        RepositoryError: The graph file is missing, or the SHA-256 of a file differs from the manifest.
        ManifestError: The manifest or the golden samples cannot be read.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        graph_path = find_graph(folder, default_filename)
        if (folder / GOLDEN_FILE).exists():
            raise RepositoryError(
                f"{folder} is incomplete: it holds {GOLDEN_FILE}, but no {MANIFEST_FILE}",
                hint="copy the whole version folder; a graph without a manifest has no other files",
            )
        return ModelVersion(graph_path=graph_path, manifest=None, golden=None)
    # Plans and scripts of other backends contain their weights, and may be larger.
    limit_bytes = GRAPH_LIMIT if manifest.graph_file.endswith(".onnx") else None
    graph_path = _check_hash(folder / manifest.graph_file, manifest.sha256, limit_bytes)
    for name, sha256 in manifest.weights.items():
        _check_hash(folder / name, sha256)
    return ModelVersion(
        graph_path=graph_path,
        manifest=manifest,
        golden=_read_golden(folder, manifest),
        contract=contract_of(folder, manifest),
    )


def find_labels(folder: Path, manifest: Manifest) -> Path | None:
    """Return the labels file of a version, or None: in the version folder or (format 1) in the model's folder."""
    if (name := manifest.labels_file) is None:
        return None
    return folder / name if (folder / name).is_file() else folder.parent / name


def label_files(config: Any, model: Path, *, clean: bool = True) -> dict[str, bytes]:
    """Contents of the labels files that a configuration names, for Triton, which takes all of a line for the label.

    Args:
        config: Triton's `ModelConfig` message. Files that are missing or outside the model are left out; Triton reports
            them.
        model: The model's folder.
        clean: Whether to check them, and to leave out byte order marks and carriage returns.

    Raises:
        ManifestError: A file is no labels file.
    """
    names = sorted({output.label_filename for output in config.output if output.label_filename})
    inside = [name for name in names if not Path(name).is_absolute() and ".." not in Path(name).parts]
    paths = {name: model / name for name in inside if (model / name).is_file()}
    if not clean:
        return {name: read_bytes(path, TEXT_LIMIT) for name, path in paths.items()}
    return {name: "".join(f"{label}\n" for label in read_labels(path)).encode() for name, path in paths.items()}


def check_label_files(config: Any, model: Path) -> None:
    """Check that Triton's classification extension returns the same labels as graphkiln's clients.

    Args:
        config: Triton's `ModelConfig` message.
        model: The model's folder, as Triton reads it.

    Raises:
        RepositoryError: A labels file has a byte order mark, or lines that end with a carriage return.
        ManifestError: A file is no labels file.
    """
    files = label_files(config, model)
    for name, content in label_files(config, model, clean=False).items():
        if content not in (files[name], files[name].removesuffix(b"\n")):
            raise RepositoryError(
                f"{model / name} has a byte order mark or carriage returns, which Triton takes for parts of labels",
                hint="save it as UTF-8 without them, or serve the model with `graphkiln serve` in its default mode",
            )


def contract_of(folder: Path, manifest: Manifest) -> Contract:
    """Read the contract of a version and check its labels.

    Args:
        folder: The version folder.
        manifest: Its manifest.

    Raises:
        RepositoryError: The labels file is missing, or its SHA-256 differs from the manifest.
        ManifestError: The labels cannot be read, or their number differs from the number of classes.
    """
    labels: tuple[str, ...] = ()
    path = find_labels(folder, manifest)
    if path is not None:
        if isinstance(manifest.labels, Labels):
            _check_hash(path, manifest.labels.sha256, TEXT_LIMIT)
        labels = read_labels(_check_exists(path))
    check_task(manifest.task, labels, manifest.signature, path)
    return Contract(
        preprocess=manifest.preprocess,
        labels=labels,
        output=manifest.signature.outputs[class_output(manifest.signature)].name
        if labels and is_classification(manifest.task)
        else "",
        ranking=manifest.ranking,
        task=manifest.task,
    )


def _read_golden(folder: Path, manifest: Manifest) -> GoldenSamples | None:
    """Read the golden samples.

    Raises:
        RepositoryError: The file is missing, or its SHA-256 differs from the manifest.
        ManifestError: The file cannot be read, or the manifest of a verified version names no samples.
    """
    if manifest.golden:
        return GoldenSamples.read(_check_hash(folder / manifest.golden.file, manifest.golden.sha256, _GOLDEN_LIMIT))
    if manifest.verification or (folder / GOLDEN_FILE).exists():
        raise ManifestError(
            f"{folder / MANIFEST_FILE} names no golden samples, but the version was verified with some",
            hint="restore the manifest or convert the model again",
        )
    return None


def _check_exists(path: Path) -> Path:
    """Check that a file exists, and return its path.

    Raises:
        RepositoryError: The file does not exist. If another framework saved a graph there, the hint is to convert it.
    """
    if path.is_file():
        return path
    if path.exists() and not path.is_dir():
        raise RepositoryError(f"{path} is not a regular file", hint="replace it by a regular file")
    foreign = None if has_own_graph(path.parent) else find_foreign_graph(path.parent)
    if foreign:
        raise RepositoryError(
            f"{path.parent} holds a graph saved by {foreign.importer.framework}, not an ONNX graph",
            hint=f"convert it: graphkiln convert {foreign.importer.kind}:{foreign.saved}",
        )
    raise RepositoryError(f"there is no {path.name} in {path.parent}", hint="a version folder holds a saved graph")


def _check_hash(path: Path, sha256: str, limit_bytes: int | None = None) -> Path:
    """Check that a file exists and has the SHA-256 of the manifest, and return its path.

    Raises:
        RepositoryError: The file is missing, cannot be read, exceeds the size limit, or has another hash.
    """
    try:
        found = known_sha256(_check_exists(path)) or sha256_of(path, limit_bytes)
    except OSError as error:
        raise RepositoryError(f"{path} cannot be read: {error.strerror or error}") from error
    if found != sha256:
        raise RepositoryError(
            f"{path} does not match {MANIFEST_FILE}: expected SHA-256 {sha256[:12]}..., got {found[:12]}...",
            hint="restore the file or convert the model again",
        )
    return path
