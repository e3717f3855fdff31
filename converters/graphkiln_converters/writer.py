"""Writes a proven graph as a version of a model repository, whole or not at all."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Conversion,
    Golden,
    Manifest,
    Provenance,
    Verification,
    sha256_of,
)
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.repository.config import config_text
from graphkiln_backend.repository.version import CONFIG_FILE, GOLDEN_FILE, GRAPH_FILE, LABELS_FILE
from graphkiln_converters.proving import ReferenceSamples, prove_graph

_MAX_BATCH_SIZE = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """What a converter knows of its source model.

    Attributes:
        description: The model and its data, in words.
        command: The command that repeats the conversion.
        libraries: Distributions whose versions matter.
        metrics: What was measured on the source task.
        preprocess: How an image becomes the input, or None.
        labels: Class names in the order of the output's last dimension; empty for none.
        ranking: What clients are told of a graph that ranks its classes itself, or None.
    """

    description: str
    command: str
    libraries: tuple[str, ...]
    metrics: Mapping[str, float]
    preprocess: Preprocess | None
    labels: Sequence[str]
    ranking: Ranking | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewVersion:
    """Everything that a version folder is written from.

    Attributes:
        graph: The ONNX file; weights of their own lie beside it.
        source: What it was made from.
        signature: Inputs and outputs.
        verification: The steps that were proven.
        golden: Samples that the server replays.
        conversion: How it was made, or None.
        max_batch_size: Largest batch that Triton may form, for a config.pbtxt that is written.
    """

    graph: Path
    source: SourceInfo
    signature: Signature
    verification: tuple[Verification, ...]
    golden: GoldenSamples
    conversion: Conversion | None = None
    max_batch_size: int = _MAX_BATCH_SIZE


def prove_and_write(
    graph: Path, source: SourceInfo, sample: ReferenceSamples, model_folder: Path, number: int
) -> Manifest:
    """Proves an exported graph and writes `MODEL/NUMBER/`, the labels, and a config.pbtxt where there is none.

    Args:
        graph: The exported ONNX file; copied.
        source: What it was made from.
        sample: Inputs, and the source model's own outputs for them.
        model_folder: Folder of the model in its repository; made when missing.
        number: Version number; must not exist yet.

    Raises:
        VerificationError: The outputs are not those of the source. Nothing is written.
        ConversionError: The version exists already.
    """
    check_free(model_folder, number)
    proof = prove_graph(graph, [sample], EXPORT)
    version = NewVersion(
        graph=graph,
        source=source,
        signature=proof.signature,
        verification=proof.verification,
        golden=proof.golden,
    )
    return write_version(version, model_folder, number)


def write_version(version: NewVersion, model_folder: Path, number: int) -> Manifest:
    """Writes a version, whole or not at all.

    Raises:
        ConversionError: The version exists already, or the folder cannot be written. Nothing is left of it.
    """
    source = version.source
    try:
        model_folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".graphkiln-", dir=model_folder) as temporary:
            folder = Path(temporary) / "version"
            folder.mkdir()
            manifest = _fill(folder, version)
            check_free(model_folder, number)
            if source.labels and not (model_folder / LABELS_FILE).exists():
                _write_new(model_folder / LABELS_FILE, "\n".join(source.labels) + "\n")
            if not (model_folder / CONFIG_FILE).exists():
                text = config_text(
                    model_folder.name,
                    version.signature,
                    max_batch_size=version.max_batch_size if version.signature.batchable else 0,
                    preprocess=source.preprocess,
                    labels_file=manifest.labels,
                    ranking=source.ranking,
                )
                _write_new(model_folder / CONFIG_FILE, text)
            folder.rename(model_folder / str(number))
    except OSError as error:
        raise ConversionError(
            f"cannot write {model_folder / str(number)}: {error.strerror or error}",
            hint="make room or choose another --model-store; nothing was left half written",
        ) from error
    return manifest


def next_number(model_folder: Path) -> int:
    """The next free version number of a model."""
    taken = [int(path.name) for path in model_folder.glob("*") if path.name.isdecimal()]
    return max(taken, default=0) + 1


def check_free(model_folder: Path, number: int) -> None:
    """Refuses a version number that is taken.

    Raises:
        ConversionError: It is.
    """
    target = model_folder / str(number)
    if target.exists():
        raise ConversionError(f"{target} exists already", hint="choose another version number")


def _fill(folder: Path, version: NewVersion) -> Manifest:
    shutil.copyfile(version.graph, folder / GRAPH_FILE)
    beside = sorted(path for path in version.graph.parent.iterdir() if path.name.startswith(f"{version.graph.name}."))
    for path in beside:
        shutil.copyfile(path, folder / path.name)
    version.golden.write(folder / GOLDEN_FILE)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        graph_file=GRAPH_FILE,
        sha256=sha256_of(folder / GRAPH_FILE),
        signature=version.signature,
        preprocess=version.source.preprocess,
        labels=LABELS_FILE if version.source.labels else None,
        provenance=_provenance(version.source),
        verification=version.verification,
        golden=Golden(
            file=GOLDEN_FILE,
            sha256=sha256_of(folder / GOLDEN_FILE),
            samples=len(next(iter(version.golden.inputs.values()))),
        ),
        conversion=version.conversion,
        weights={path.name: sha256_of(folder / path.name) for path in beside},
        ranking=version.source.ranking,
    )
    manifest.write(folder / MANIFEST_FILE)
    return manifest


def _write_new(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(text)
    temporary.rename(path)


def _provenance(source: SourceInfo) -> Provenance:
    versions = {name: metadata.version(name) for name in source.libraries}
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    return Provenance(
        source=source.description, command=source.command, versions=versions, metrics=dict(source.metrics)
    )
