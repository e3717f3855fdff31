"""Write a proven graph as a version of a model repository, atomically."""

from __future__ import annotations

import errno
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path

from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.errors import ConversionError, GraphkilnError, ManifestError, RepositoryError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES, ACCEPT_IMAGES_LINE
from graphkiln_backend.graph.image_model import accepts_images as accepts
from graphkiln_backend.graph.manifest import (
    FORMAT_VERSION,
    MANIFEST_FILE,
    Adoption,
    Conversion,
    Golden,
    Labels,
    Manifest,
    Provenance,
    Verification,
    sha256_of,
)
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.task import Ranking, Task, check_task, labels_text
from graphkiln_backend.graph.text import fault_in_name
from graphkiln_backend.proof.policy import EXPORT
from graphkiln_backend.repository.config import complete, config_text, read_config
from graphkiln_backend.repository.version import (
    CONFIG_FILE,
    GOLDEN_FILE,
    GRAPH_FILE,
    LABELS_FILE,
    ModelVersion,
    newest_version,
    read_version_signature,
)
from graphkiln_backend.repository.version_folders import version_number
from graphkiln_converters.prove import ReferenceSamples, prove_graph

_MAX_BATCH_SIZE = 32
_NUMBERED = re.compile(r"\b(INPUT|OUTPUT)_\d+\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceInfo:
    """Facts about a source model.

    Attributes:
        description: Description of the model and its data.
        command: Command that repeats the conversion.
        libraries: Distributions whose versions are recorded.
        metrics: Metrics of the source task.
        preprocess: Preprocessing of an image, or None.
        labels: Class names in the order of the output's last dimension; empty for none.
        ranking: Outputs of an embedded top-k, or None.
        task: The image task, or None.
    """

    description: str
    command: str
    libraries: tuple[str, ...]
    metrics: Mapping[str, float]
    preprocess: Preprocess | None
    labels: Sequence[str]
    ranking: Ranking | None = None
    task: Task | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewVersion:
    """Content of a new version folder.

    Attributes:
        graph: The ONNX file; external weights are beside it.
        source: Its source.
        signature: Inputs and outputs.
        verification: The proofs.
        golden: Golden samples.
        conversion: Details of the conversion, or None.
        max_batch_size: Maximum batch size, for a new config.pbtxt.
        accepts_images: Whether the model also accepts encoded images.
        engine: Value of `engine` in a new config.pbtxt; empty for the default.
    """

    graph: Path
    source: SourceInfo
    signature: Signature
    verification: tuple[Verification, ...]
    golden: GoldenSamples
    conversion: Conversion | None = None
    max_batch_size: int = _MAX_BATCH_SIZE
    accepts_images: bool = False
    engine: str = ""


def prove_and_write(
    graph: Path, source: SourceInfo, sample: ReferenceSamples, model_folder: Path, number: int
) -> Manifest:
    """Prove an exported graph and write `MODEL/NUMBER/`, and a config.pbtxt if there is none.

    Args:
        graph: The exported ONNX file; copied.
        source: Its source.
        sample: Inputs and outputs of the source model.
        model_folder: Folder of the model in its repository; created if missing.
        number: Version number; must not exist.

    Raises:
        VerificationError: The outputs differ from the source. Nothing is written.
        ConversionError: The version exists.
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
    return Manifest.read(write_version(version, model_folder, number) / MANIFEST_FILE)


def write_version(version: NewVersion, model_folder: Path, number: int | None = None) -> Path:
    """Write a version atomically, and a config.pbtxt if there is none.

    The rename that publishes the folder claims the number, so that concurrent conversions get distinct ones.

    Args:
        version: The version.
        model_folder: Folder of the model in its repository; created if missing.
        number: Version number, which must not exist; None for the next free one.

    Returns:
        Folder of the version.

    Raises:
        ConversionError: The version exists, contradicts the model's config.pbtxt, or cannot be written. Its folder is
            removed; a new config.pbtxt stays if only the number could not be claimed, because another conversion may
            use it.
    """
    check_name(model_folder.name)
    try:
        with _made(model_folder), tempfile.TemporaryDirectory(prefix=".graphkiln-", dir=model_folder) as temporary:
            scratch = Path(temporary)
            folder = scratch / "version"
            folder.mkdir()
            manifest = _fill(folder, version)
            if number is not None:
                check_free(model_folder, number)
            if not (model_folder / CONFIG_FILE).exists():
                draft = scratch / CONFIG_FILE
                draft.write_text(_config_text(model_folder.name, version), encoding="utf-8")
                check_newest_fits(model_folder, draft)
                _link_new(model_folder / CONFIG_FILE, draft)
            check_fits(model_folder / CONFIG_FILE, version.signature, accepts_images=version.accepts_images)
            return _claim(folder, model_folder, number, manifest)
    except OSError as error:
        raise ConversionError(
            f"cannot write a version into {model_folder}: {error.strerror or error}",
            hint="make room or choose another --model-store; nothing was left half written",
        ) from error


@contextmanager
def _made(folder: Path) -> Iterator[None]:
    """Create a folder and its parents; remove the created ones if they stay empty."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    finally:
        with suppress(OSError):  # the first one that is not empty
            for path in missing:
                path.rmdir()


def _config_text(name: str, version: NewVersion) -> str:
    text = config_text(
        name,
        version.signature,
        max_batch_size=version.max_batch_size if version.signature.batchable else 0,
        labels_file=None,
        contract=Contract(
            preprocess=version.source.preprocess, ranking=version.source.ranking, task=version.source.task
        ),
    )
    if version.engine:
        text += f'parameters {{ key: "engine" value {{ string_value: "{version.engine}" }} }}\n'
    return f"{text}{ACCEPT_IMAGES_LINE}\n" if version.accepts_images else text


def check_name(name: str) -> None:
    """Check a model name.

    Raises:
        ConversionError: The name is invalid.
    """
    if fault := fault_in_name(name):
        raise ConversionError(fault, hint="choose another --name")


def _fill(folder: Path, version: NewVersion) -> Manifest:
    shutil.copyfile(version.graph, folder / GRAPH_FILE)
    beside = sorted(path for path in version.graph.parent.iterdir() if path.name.startswith(f"{version.graph.name}."))
    for path in beside:
        shutil.copyfile(path, folder / path.name)
    version.golden.write(folder / GOLDEN_FILE)
    labels = _write_labels(folder / LABELS_FILE, version)
    hashes = {name: sha256_of(folder / name) for name in (GRAPH_FILE, *(path.name for path in beside))}
    manifest = _manifest(folder, version, labels, hashes)
    manifest.write(folder / MANIFEST_FILE)  # detects a full disk before config.pbtxt is written
    return manifest


def write_beside_graph(
    folder: Path,
    version: NewVersion,
    hashes: Mapping[str, str],
    adoption: Adoption,
    check: Callable[[ModelVersion], None] = lambda _: None,
) -> Manifest:
    """Write golden samples, labels and a manifest into the folder of an existing graph.

    The files are complete when they get their names, the manifest last: a server may look at any time.

    Args:
        folder: The version folder.
        version: The new content.
        hashes: SHA-256 of the graph and the files that belong to it, by name.
        adoption: Origin of the golden samples.
        check: Raises an error if the version must not be written.

    Raises:
        ConversionError: The labels do not fit, there are others, or the files cannot be written.
    """
    if version.source.labels and (folder / LABELS_FILE).exists():
        raise ConversionError(f"{folder / LABELS_FILE} already exists", hint="remove it, or leave --labels out")
    try:
        with tempfile.TemporaryDirectory(prefix=".graphkiln-", dir=folder) as temporary:
            scratch = Path(temporary)
            version.golden.write(scratch / GOLDEN_FILE)
            labels = _write_labels(scratch / LABELS_FILE, version)
            manifest = _manifest(scratch, version, labels, hashes, adoption)
            manifest.write(scratch / MANIFEST_FILE)
            check(ModelVersion(graph_path=version.graph, manifest=manifest, golden=version.golden))
            for name in (LABELS_FILE, GOLDEN_FILE, MANIFEST_FILE):
                if (scratch / name).exists():
                    (scratch / name).rename(folder / name)
    except OSError as error:
        raise ConversionError(f"cannot write into {folder}: {error.strerror or error}", hint="make room") from error
    return Manifest.read(folder / MANIFEST_FILE)


def _manifest(
    folder: Path,
    version: NewVersion,
    labels: Labels | None,
    hashes: Mapping[str, str],
    adoption: Adoption | None = None,
) -> Manifest:
    """Describe a version whose golden samples are in a folder.

    Args:
        folder: The folder.
        version: The version.
        labels: Its labels file, or None.
        hashes: SHA-256 of the graph and the files of its weights, by name.
        adoption: Origin of the golden samples of a graph with a name of its own, or None.
    """
    graph_file = version.graph.name if adoption else GRAPH_FILE
    return Manifest(
        format_version=FORMAT_VERSION,
        graph_file=graph_file,
        sha256=hashes[graph_file],
        signature=version.signature,
        preprocess=version.source.preprocess,
        labels=labels,
        provenance=_provenance(version.source),
        verification=version.verification,
        golden=Golden(
            file=GOLDEN_FILE,
            sha256=sha256_of(folder / GOLDEN_FILE),
            samples=version.golden.count,
        ),
        conversion=version.conversion,
        weights={name: sha256 for name, sha256 in hashes.items() if name != graph_file},
        ranking=version.source.ranking,
        task=version.source.task,
        adoption=adoption,
    )


def _write_labels(path: Path, version: NewVersion) -> Labels | None:
    """Write the labels file, if the version has labels."""
    labels = version.source.labels
    try:
        check_task(version.source.task, labels, version.signature, "the source")
        if not labels:
            return None
        path.write_text(labels_text(labels), encoding="utf-8")
    except ManifestError as error:
        raise ConversionError(error.message, hint=error.hint) from error
    return Labels(file=path.name, sha256=sha256_of(path), count=len(labels))


def _link_new(path: Path, draft: Path) -> None:
    """Publish a file atomically, without replacing an existing one."""
    try:
        path.hardlink_to(draft)
    except OSError:  # it exists, or the file system has no hard links: FAT, SMB, mounted buckets
        if not path.exists():
            draft.rename(path)


def _provenance(source: SourceInfo) -> Provenance:
    versions = {name: metadata.version(name) for name in source.libraries}
    versions["python"] = ".".join(map(str, sys.version_info[:3]))
    return Provenance(
        source=source.description, command=source.command, versions=versions, metrics=dict(source.metrics)
    )


# The number of a new version, unique among concurrent conversions.

# Errors of a rename if the target exists. Source: rename(2).
_TAKEN = {errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR}


def next_number(model_folder: Path) -> int:
    """The next free version number of a model."""
    taken = [number for path in model_folder.glob("*") if (number := version_number(path.name)) is not None]
    return max(taken, default=0) + 1


def check_free(model_folder: Path, number: int) -> None:
    """Check that a version number is free.

    Raises:
        ConversionError: The version exists.
    """
    target = model_folder / str(number)
    if target.exists():
        raise _exists(target)


def _claim(folder: Path, model_folder: Path, requested: int | None, manifest: Manifest) -> Path:
    """Rename a complete folder to its number, which fails if the version exists.

    The number is written to the recipe in the manifest before each attempt.

    Raises:
        ConversionError: The requested number is taken.
        OSError: The folder cannot be renamed.
    """
    conversion = manifest.conversion
    while True:
        number = requested or next_number(model_folder)
        if conversion:
            numbered = replace(conversion, recipe={**conversion.recipe, "version": number})
            replace(manifest, conversion=numbered).write(folder / MANIFEST_FILE)
        target = model_folder / str(number)
        try:
            return folder.rename(target)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            if requested is not None:
                raise _exists(target) from error


def _exists(target: Path) -> ConversionError:
    return ConversionError(f"{target} already exists", hint="choose another version number")


# Checks of a new version against the model's configuration and its other versions.


def check_fits(config: Path, signature: Signature, *, accepts_images: bool = False) -> None:
    """Check a version against the model's configuration.

    Raises:
        ConversionError: The configuration has another signature, or does not accept encoded images.
    """
    try:
        given = read_config(config)
        complete(given, signature, labels_file=None)
        encoded = ACCEPT_IMAGES in given.parameters and accepts(given.parameters[ACCEPT_IMAGES].string_value)
        if accepts_images and not encoded:
            raise ConversionError(
                f"{config} was written earlier and does not accept encoded images",
                hint=f"add: {ACCEPT_IMAGES_LINE}",
            )
    except RepositoryError as error:
        raise ConversionError(
            f"{config} does not fit the new version: {error.message}",
            hint=f"{_names_before(error)}choose another --name, or remove what contradicts it from config.pbtxt",
        ) from error


def check_newest_fits(model_folder: Path, config: Path) -> None:
    """Check that a version has the signature of the model's newest version.

    Raises:
        ConversionError: The model's newest version contradicts the new one's configuration.
    """
    try:
        newest = newest_version(model_folder)
        signature = read_version_signature(newest)
    except GraphkilnError:  # there is none that could serve
        return
    try:
        complete(read_config(config), signature, labels_file=None)
    except RepositoryError as error:
        raise ConversionError(
            f"version {newest.name} of '{model_folder.name}' has another signature than the new version: "
            f"{error.message}",
            hint=f"{_names_before(error)}choose another --name: Triton has one signature for all versions of a model",
        ) from error


def _names_before(error: RepositoryError) -> str:
    """Advice where the versions before may have been converted with numbered tensors."""
    return "give --no-keep-names for INPUT_<i> and OUTPUT_<i>, or " if _NUMBERED.search(str(error)) else ""
