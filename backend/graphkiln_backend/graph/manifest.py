"""The manifest: everything that a version knows about its graph, as one JSON document beside it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.decoding import OMIT_DEFAULT, decode, encode
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.files import TEXT_LIMIT, open_regular, read_bytes
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.task import Ranking, Task

# Format written. Format 1, without hashes of labels and of the manifest itself, is still read.
FORMAT_VERSION = 2
MANIFEST_FILE = "manifest.json"

_DIGEST = "digest"
_DIGEST_CHARACTERS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Origin of a graph.

    Attributes:
        source: The source model and data, in words.
        command: The command that made this version.
        versions: Version of each library at conversion, by name.
        metrics: What was measured on the source task, for example `{"test_accuracy": 0.99}`.
    """

    source: str
    command: str
    versions: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verification:
    """One proof, with the figures that were measured and the limits that they were held to.

    Attributes:
        step: Name of the row of the numeric policy (`proof.policy.Limits`).
        samples: Number of samples compared.
        batch_sizes: Batch sizes that were run.
        relative_l2: Worst `|y - r| / |r|` over the outputs.
        relative_l2_limit: The limit used.
        worst_element: Worst `max |y - r| / (|r| + RMS(r))` over the outputs.
        worst_element_limit: The limit used; None where the policy has none.
        verdict: The same in one line, for people.
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
    """The labels file beside the graph: a class name a line, UTF-8.

    Attributes:
        file: Its name.
        sha256: Of the file, hexadecimal.
        count: Number of labels.
    """

    file: str
    sha256: str
    count: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PassRecord:
    """A pass that ran, with the number of nodes before and after; `note` says what it left as it was."""

    name: str
    nodes_before: int
    nodes_after: int
    note: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """Conversion of a graph, in enough detail to repeat it.

    Attributes:
        recipe: The frozen recipe, as `graphkiln convert --recipe` reads it.
        precision: Element type of most of the arithmetic.
        passes: The graph passes that ran, in order.
        output_errors: Relative L2 error of each output.
        graph_bytes: Size of the graph file and its weights.
        seconds: Time that the conversion took.
        notes: What a person should know, such as what could not be judged.
    """

    recipe: dict[str, Any]
    precision: Precision
    passes: tuple[PassRecord, ...]
    output_errors: dict[str, float]
    graph_bytes: int
    seconds: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Description of a saved static graph.

    Attributes:
        format_version: Version of this document's format.
        graph_file: The graph's file name, beside the manifest.
        sha256: Of the graph file, hexadecimal.
        signature: Inputs and outputs.
        preprocess: How an image becomes the first input, or None.
        labels: The labels file, or None; in format 1 its name in the model's folder.
        provenance: Where the graph came from.
        verification: The proofs.
        golden: The golden samples, or None.
        conversion: How `graphkiln convert` made the graph, or None where something else did.
        weights: SHA-256 of each file of weights beside the graph, by file name.
        ranking: The outputs of an embedded top-k, or None.
        task: What the graph answers about an image; None is a classification, or whatever its outputs are.
        digest: SHA-256 of all other values as they stand in the file, hexadecimal; empty in format 1, and until it is
            written.
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
            ManifestError: Missing, not JSON, not as it was written, or a key is unknown, missing or of the wrong type.
        """
        try:
            document = json.loads(read_bytes(path, TEXT_LIMIT))
        except OSError as error:
            raise ManifestError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ManifestError(f"{path} is not JSON: {error}") from error
        try:
            return _decode(document)
        except ManifestError as error:
            raise ManifestError(f"{path}: {error.message}", hint=error.hint) from error

    def write(self, path: Path) -> None:
        """Write the manifest as readable JSON that `read` accepts, with a hash of its content."""
        document = {key: value for key, value in encode(self).items() if key != _DIGEST}
        if self.format_version > 1:
            document[_DIGEST] = _digest(document)
        path.write_text(json.dumps(document, indent=2) + "\n")


def _decode(document: Any) -> Manifest:
    """The manifest of a document, whose hash fits.

    Raises:
        ManifestError: It is no manifest, was changed by hand, or is cut short.
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
    """SHA-256 of a document's values, however they are laid out and ordered."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def sha256_of(path: Path, limit_bytes: int | None = None) -> str:
    """SHA-256 of a file's content, hexadecimal.

    Args:
        path: The file.
        limit_bytes: Largest size; None for any.

    Raises:
        OSError: It cannot be read, is no regular file, or is larger.
    """
    with open_regular(path, limit_bytes) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
