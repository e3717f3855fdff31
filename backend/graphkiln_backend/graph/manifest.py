"""The manifest: description of a version's graph, as a JSON document beside it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.decoding import OMIT_DEFAULT, decode, encode
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.files import TEXT_LIMIT, open_regular, read_bytes
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.task import Ranking, Task

# Written format. Format 1, without hashes of labels and of the manifest, is still read.
FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"

_DIGEST = "digest"
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Origin of a graph.

    Attributes:
        source: Description of the source model and data.
        command: Command that created this version.
        versions: Library versions at conversion, by name.
        metrics: Metrics on the source task, for example `{"test_accuracy": 0.99}`.
    """

    source: str
    command: str
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """A proof, with measured errors and limits.

    Attributes:
        step: Name of the row of the numeric policy (`proof.policy.Limits`).
        samples: Number of samples compared.
        batch_sizes: Batch sizes tested.
        relative_l2: Worst `|y - r| / |r|` over the outputs.
        relative_l2_limit: The limit used.
        worst_element: Worst `max |y - r| / (|r| + RMS(r))` over the outputs.
        worst_element_limit: The limit used; None without a limit.
        verdict: Summary in one line.
    """

    step: str
    samples: int
    batch_sizes: tuple[int, ...]
    relative_l2: float
    relative_l2_limit: float
    worst_element: float
    worst_element_limit: float | None
    verdict: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Golden:
    """The golden samples file beside the graph."""

    file: str
    sha256: str
    samples: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Labels:
    """The labels file beside the graph: one class name per line, UTF-8.

    Attributes:
        file: File name.
        sha256: SHA-256 of the file, hexadecimal.
        count: Number of labels.
    """

    file: str
    sha256: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """A pass that ran, with the number of nodes before and after; `note` describes what it did not change."""

    name: str
    nodes_before: int
    nodes_after: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Conversion of a graph, in enough detail to repeat it.

    Attributes:
        recipe: Frozen recipe for `graphkiln convert --recipe`, and in `digests`, if known, `digest_of` the source and
            of each file that it names, by their keys.
        precision: Element type of most operations.
        passes: Graph passes in order.
        output_errors: Relative L2 error of each output.
        graph_bytes: Size of the graph file and its weights.
        seconds: Duration of the conversion.
        notes: Remarks, for example about undecided samples.
        digests: The recipe's `digests` as written by checkouts of 29 November 2026, still read.
    """

    recipe: dict[str, Any]
    precision: Precision
    passes: tuple[PassRecord, ...]
    output_errors: dict[str, float]
    graph_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()
    digests: dict[str, str] = field(default_factory=dict, metadata=OMIT_DEFAULT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adoption:
    """Golden samples that were added by `graphkiln adopt` to a graph of another tool.

    Attributes:
        reference: Description of the model or file whose outputs are expected.
        precision: Precision that the graph is meant to compute in: selects the limits.
        recorded: The outputs were recorded from the graph itself, because there was no reference.
    """

    reference: str
    precision: Precision
    recorded: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a saved static graph.

    Attributes:
        format_version: Version of this document's format.
        graph_file: File name of the graph, beside the manifest.
        sha256: SHA-256 of the graph file, hexadecimal.
        signature: Inputs and outputs.
        preprocess: Preprocessing of an image to the first input, or None.
        labels: The labels file, or None; in format 1 its name in the model's folder.
        provenance: Origin of the graph.
        verification: The proofs.
        golden: The golden samples, or None.
        conversion: Details of `graphkiln convert`, or None for graphs made otherwise.
        weights: SHA-256 of each weight file beside the graph, by file name.
        ranking: Outputs of an embedded top-k, or None.
        task: Image task; None for classification, or models without a task.
        adoption: Origin of the golden samples of a graph that another tool wrote, or None.
        digest: SHA-256 of all other values in the file, hexadecimal; empty in format 1, and before it is written.
    """

    format_version: int
    graph_file: str
    sha256: str
    signature: Signature
    preprocess: Preprocess | None
    labels: str | Labels | None
    provenance: Provenance
    verification: tuple[Verification, ...]
    golden: Golden | None
    conversion: Conversion | None = None
    weights: dict[str, str] = field(default_factory=dict)
    ranking: Ranking | None = None
    task: Task | None = field(default=None, metadata=OMIT_DEFAULT)
    adoption: Adoption | None = field(default=None, metadata=OMIT_DEFAULT)
    digest: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not 1 <= self.format_version <= FORMAT_VERSION:
            raise ManifestError(
                f"manifest format {self.format_version} is not known, this graphkiln reads 1 to {FORMAT_VERSION}",
                hint="upgrade graphkiln" if self.format_version > FORMAT_VERSION else "convert the model again",
            )
        for name in (self.graph_file, self.golden.file if self.golden else None, self.labels_file, *self.weights):
            if name is not None and (name in ("", "..") or Path(name).name != name):
                raise ManifestError(f"'{name}' must be a plain file name inside the model's folder")

    @property
    def graph_digest(self) -> str:
        """First 16 hexadecimal digits of a SHA-256 of the graph and its weights."""
        files = [self.sha256, *(f"{name} {self.weights[name]}" for name in sorted(self.weights))]
        return hashlib.sha256("\n".join(files).encode()).hexdigest()[:_DIGEST_CHARACTERS]

    @property
    def labels_file(self) -> str | None:
        """Name of the labels file, or None."""
        return self.labels.file if isinstance(self.labels, Labels) else self.labels

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Read a manifest file.

        Raises:
            ManifestError: The file is missing, not JSON, or was modified, or a key is unknown, missing or of a wrong
                type.
        """
        try:
            return _parse(read_bytes(path, TEXT_LIMIT))
        except OSError as error:
            raise ManifestError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is not JSON: {error}") from error
        except ManifestError as error:
            raise ManifestError(f"{path}: {error.message}", hint=error.hint) from error

    def write(self, path: Path) -> None:
        """Write the manifest as readable JSON with a hash of its content."""
        document = {key: value for key, value in encode(self).items() if key != _DIGEST}
        if self.format_version > 1:
            document[_DIGEST] = _digest(document)
        path.write_text(json.dumps(document, indent=2) + "\n")


@lru_cache(maxsize=256)  # a start reads each manifest several times
def _parse(content: bytes) -> Manifest:
    return _decode(json.loads(content))


def _decode(document: Any) -> Manifest:
    """Decode a document and check its hash.

    Raises:
        ManifestError: It is not a manifest, or was modified or truncated.
    """
    manifest = decode(Manifest, document)
    content = {key: value for key, value in document.items() if key != _DIGEST}
    if manifest.format_version > 1 and manifest.digest != _digest(content):
        raise ManifestError(
            f"it is not as it was written: its content does not fit its '{_DIGEST}'",
            hint="restore the file or convert the model again",
        )
    return manifest


def _digest(content: dict[str, Any]) -> str:
    """SHA-256 of a document's values, independent of their layout and order."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_of(path: Path, limit_bytes: int | None = None) -> str:
    """SHA-256 of a file's content, hexadecimal.

    Args:
        path: The file.
        limit_bytes: Maximum size; None for no limit.

    Raises:
        OSError: It cannot be read, is not a regular file, or is too large.
    """
    with open_regular(path, limit_bytes) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest_of(path: Path, files: Iterable[Path] = ()) -> str:
    """SHA-256 of a file; of a folder or several files, that of sha256sum's lines in the order of their paths.

    Args:
        path: A file or folder.
        files: Files that belong to it, in the folder of the file or below.

    Raises:
        OSError: A file cannot be read.
    """
    folder = path if path.is_dir() else path.parent
    found = [*(each for each in path.rglob("*") if each.is_file())] if path.is_dir() else [path, *files]
    if found == [path]:
        return sha256_of(path)
    hashes = {each.relative_to(folder).as_posix(): sha256_of(each) for each in found}
    lines = [f"{hashes[name]}  {name}\n" for name in sorted(hashes)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
