"""The model to tune: its configuration, today's deployment, ensembles and an optional int8 graph."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.errors import InvalidInput, RepositoryError, VerificationError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.task import Classification
from graphkiln_backend.lowering.acceptance import promised_signature
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.repository.config import read_config, select_versions
from graphkiln_backend.repository.config_changes import NO_BATCHER, ConfigChanges, has_one_group
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.onnx_file import read_mixing
from graphkiln_backend.repository.overlay import complete_config, copy_labels, write_mirror
from graphkiln_backend.repository.version import CONFIG_FILE, GraphFormat, read_version_signature
from graphkiln_backend.repository.version_folders import version_folders
from graphkiln_backend.server.run_folder import BACKEND_NAMES
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.system.resources import usable_cores


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A version of a model and its current deployment.

    Attributes:
        folder: The model's folder, which is only read.
        version: Version number.
        config: Configuration, completed from the graph.
        deployment: Engine, precision and settings that the server would choose today.
        cores: Number of usable cores.
        single_group: config.pbtxt has one instance group, so that the number of instances is one number.
        schedules_sequences: Triton schedules whole sequences of requests instead of single requests.
        queue_delay_us: Queue delay of the dynamic batcher in microseconds; `NO_BATCHER` without one.
        mixing: Reason why rows cannot be computed together in a batch; "" if they can.
        config_sha256: Digest of config.pbtxt; "" without the file.
        ensembles: Name -> max_batch_size of each ensemble in the same store with this model as a step.
        int8: Version folder with an int8 graph of the model; None without one.
        no_int8: Reason why the requested int8 graph could not be made; "" if none was requested.
    """

    folder: Path
    version: int
    config: ModelConfig
    deployment: Deployment
    cores: int
    single_group: bool = True
    schedules_sequences: bool = False
    queue_delay_us: int = NO_BATCHER
    mixing: str = ""
    config_sha256: str = ""
    ensembles: Mapping[str, int] = field(default_factory=dict)
    int8: Path | None = None
    no_int8: str = ""

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.folder.name

    @property
    def signature(self) -> Signature:
        """Input and output tensors of requests."""
        return promised_signature(self.deployment.version)


def read_subject(version: Path, cache: ArtifactCache) -> Subject:
    """Read a version folder in the same way as the server.

    Raises:
        GraphkilnError: The version or its configuration is invalid, or no engine can run it as configured.
    """
    version = version.absolute()
    number = int(version.name)
    completed = complete_config(
        version.parent, BACKEND_NAMES, partial(convert_if_needed, cache=cache), number, [number]
    )
    config = ModelConfig.from_protobuf(completed, has_gpu=bool(gpus()))
    deployment = Deployment.here(version, config, cache)
    if deployment.version.format is not GraphFormat.ONNX:
        raise RepositoryError(
            f"{deployment.version.graph_path} is in {deployment.version.format}; tune compares engines for ONNX graphs",
            hint="tune the ONNX file that the graph was made from",
        )
    has_batcher = completed.HasField("dynamic_batching") and completed.max_batch_size >= 2
    batching = completed.dynamic_batching
    return Subject(
        folder=version.parent,
        version=number,
        config=config,
        deployment=deployment,
        cores=usable_cores(),
        single_group=has_one_group(completed),
        schedules_sequences=completed.HasField("sequence_batching"),
        queue_delay_us=int(batching.max_queue_delay_microseconds) if has_batcher else NO_BATCHER,
        # golden samples were proven in batches; without them, the nodes decide
        mixing="" if deployment.version.golden else read_mixing(deployment.version.graph_path),
        config_sha256=_sha256_of_config(version.parent),
        ensembles=ensembles_of(version.parent),
    )


# Ensembles limit how small the max_batch_size of their steps may become.
#
# Source: Triton core, `ValidateEnsembleConfig`: a step that takes batches takes those of its ensemble; a step without
# batches is judged by its shapes alone.


def ensembles_of(model: Path) -> dict[str, int]:
    """Find the ensembles of the same store that use a model; return name -> max_batch_size."""
    found = {}
    for path in sorted(model.parent.glob(f"[!.]*/{CONFIG_FILE}")):
        try:
            config = read_config(path)
        except RepositoryError:
            continue
        if any(step.model_name == model.name for step in config.ensemble_scheduling.step):
            found[path.parent.name] = int(config.max_batch_size)
    return found


def check_tunable(subject: Subject) -> None:
    """Check that the search can load and change the model's configuration.

    Raises:
        RepositoryError: The model is spread over devices, or Triton schedules whole sequences.
    """
    config, spread = subject.folder / CONFIG_FILE, subject.deployment.settings.parallel
    if spread:
        raise RepositoryError(
            f"{config} spreads '{subject.name}' over devices (parallel: {spread}), which determines threads, instances "
            "and placement: there is nothing to tune",
            hint="graphkiln explain shows them; to tune the model, make a copy without `parallel`",
        )
    if subject.schedules_sequences:
        raise RepositoryError(
            f"{config} enables `sequence_batching`, but the search sends independent requests",
            hint="if the graph is stateless, tune a copy without `sequence_batching`",
        )


def check_unchanged(subject: Subject) -> None:
    """Check that config.pbtxt has not changed since it was read.

    Raises:
        RepositoryError: It was changed.
    """
    if _sha256_of_config(subject.folder) != subject.config_sha256:
        raise RepositoryError(
            f"{subject.folder / CONFIG_FILE} was changed during tuning: the measurements are of the old one",
            hint="run the same command again to measure the new one",
        )


def _sha256_of_config(model: Path) -> str:
    path = model / CONFIG_FILE
    return sha256_of(path) if path.exists() else ""


def served_versions(subject: Subject, added: Collection[int] = ()) -> list[int]:
    """Return the versions that a server loads by the version policy, in ascending order.

    Raises:
        RepositoryError: The configuration is no longer valid.
    """
    config = read_config(subject.folder / CONFIG_FILE)
    return select_versions(config, {*version_folders(subject.folder.iterdir()), *added})


@contextmanager
def vanishing_cache() -> Iterator[ArtifactCache]:
    """Create a temporary artifact cache and remove it at the end of the context."""
    with OwnedFolder(prefix="graphkiln-cache-") as folder, ArtifactCache(folder.path) as cache:
        yield cache


# A trial serves a temporary store: one version of the model, a changed configuration, and links to the user's files.

# Name prefix of the temporary folders.
PREFIX = "graphkiln-tune-"


@contextmanager
def stage(subject: Subject, changes: ConfigChanges, version: Path | None = None) -> Iterator[Path]:
    """Create a temporary store with a changed configuration and remove it at the end of the context.

    Raises:
        RepositoryError: The changes do not fit the configuration.
    """
    config = read_config(subject.folder / CONFIG_FILE)
    changes.apply(config)
    config.ClearField("version_policy")  # the store holds the tuned version only
    with OwnedFolder(prefix=PREFIX) as folder:
        store = folder.path / "store"
        model = store / subject.name
        write_mirror(subject.folder, model, [] if version else [subject.version], config)
        if version:
            (model / str(subject.version)).symlink_to(version)
            copy_labels(subject.folder, model, config)
        yield store


# `--calibration`: convert the model to an int8 graph, proven like any other version, and try it as well.

_ELSEWHERE = "graphkiln convert SOURCE --precision int8 --calibration PATH makes a version that can be tuned"


def with_int8(subject: Subject, calibration: Path, samples: Path | None, folder: Path) -> Subject:
    """Return the subject with an int8 graph, or with the reason why the int8 graph failed its proof.

    Raises:
        InvalidInput: The graph is not saved in fp32, or its outputs are not class scores.
        ConversionError: The samples are unusable, or no node of the graph can become int8.
    """
    saved, contract = subject.deployment.saved, subject.deployment.version.contract
    if saved is not Precision.FP32:
        raise InvalidInput(f"--calibration needs a graph saved in fp32, but this one is {saved}", hint=_ELSEWHERE)
    if contract.ranking or not isinstance(contract.task, Classification | None):
        raise InvalidInput("--calibration needs a model whose only outputs are class scores", hint=_ELSEWHERE)
    try:
        version = _convert(subject, calibration.absolute(), samples.absolute() if samples else None, folder)
    except VerificationError as error:
        return replace(subject, no_int8=f"the int8 graph failed its proof: {error}")
    own, found = subject.signature, read_version_signature(version, "")
    for ours, theirs in ((own.inputs, found.inputs), (own.outputs, found.outputs)):  # one config.pbtxt describes both
        if len(ours) != len(theirs) or not all(one.is_like(other) for one, other in zip(ours, theirs, strict=True)):
            raise InvalidInput("--calibration: the int8 graph has different tensors than the model", hint=_ELSEWHERE)
    return replace(subject, int8=version)


def _convert(subject: Subject, calibration: Path, samples: Path | None, folder: Path) -> Path:
    from graphkiln_converters.convert import convert
    from graphkiln_converters.recipe import Recipe

    folder.mkdir()
    contract = subject.deployment.version.contract
    labels = folder / "labels.txt"
    labels.write_text("".join(f"{label}\n" for label in contract.labels), encoding="utf-8")
    recipe = Recipe(
        source=str(subject.deployment.version.graph_path),
        name=subject.name,
        model_store=folder / "store",
        keep_names=True,
        preprocess=json.loads(encode_json(contract.preprocess)) if contract.preprocess else None,
        labels=labels if contract.labels else None,
        batch="free" if subject.signature.batchable else "fixed",
        precision=Precision.INT8,
        int8_by="onnxruntime",  # NNCF's graphs are fast with OpenVINO alone, and the search may have to do without it
        calibration=calibration,
        samples=samples,
    )
    return convert(recipe)
