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
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.errors import InvalidInput, RepositoryError, VerificationError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.task import Classification
from graphkiln_backend.lowering.acceptance import promised_signature
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.repository.config import ModelConfigProto, read_config, select_versions
from graphkiln_backend.repository.config_changes import NO_BATCHER, ConfigChanges, has_one_group
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.onnx_file import read_mixing
from graphkiln_backend.repository.overlay import complete_config, copy_labels, write_mirror
from graphkiln_backend.repository.version import CONFIG_FILE, read_version_signature
from graphkiln_backend.repository.version_folders import version_folders
from graphkiln_backend.server.run_folder import BACKEND_NAMES
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.system.resources import usable_cores


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A version of a model and its current deployment.

    Attributes:
        folder: The model's folder; never written to while it is tuned.
        version: Number of the version.
        config: The configuration, completed from the graph.
        deployment: What the server would make of it today.
        cores: Cores that may be used.
        single_group: Whether the number of instances is one number.
        schedules_sequences: Whether Triton schedules whole sequences of requests, not single ones.
        queue_delay_us: Microseconds that the dynamic batcher waits; `NO_BATCHER` without one.
        mixing: Why the rows of a batch cannot be computed together; empty where they can.
        config_sha256: Of its config.pbtxt; empty without one.
        ensembles: Those of its store that it is a step of, by name, each with its largest batch.
        int8: Folder of a version with an int8 graph of it, beside its own; None without one.
        no_int8: Why there is none, where one was asked for.
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
        """The tensors that requests hold."""
        return promised_signature(self.deployment.version)


def read_subject(version: Path, cache: ArtifactCache) -> Subject:
    """Read a version as the server would.

    Raises:
        GraphkilnError: The version or its configuration is not usable, or nothing can run it as requested.
    """
    version = version.absolute()
    completed = complete_for(version, cache)
    config = ModelConfig.from_protobuf(completed, has_gpu=bool(gpus()))
    deployment = Deployment.here(version, config, cache)
    return Subject(
        folder=version.parent,
        version=int(version.name),
        config=config,
        deployment=deployment,
        cores=usable_cores(),
        single_group=has_one_group(completed),
        schedules_sequences=completed.HasField("sequence_batching"),
        queue_delay_us=_queue_delay(completed),
        mixing=_mixing(deployment),
        config_sha256=_sha256_of_config(version.parent),
        ensembles=ensembles_of(version.parent),
    )


def complete_for(version: Path, cache: ArtifactCache) -> ModelConfigProto:
    """A model's configuration, completed for one version alone.

    Raises:
        RepositoryError: The configuration or the graph is not usable.
    """
    number = int(version.name)
    return complete_config(version.parent, BACKEND_NAMES, partial(convert_if_needed, cache=cache), number, [number])


def _queue_delay(config: ModelConfigProto) -> int:
    if not config.HasField("dynamic_batching") or config.max_batch_size < 2:
        return NO_BATCHER
    return int(config.dynamic_batching.max_queue_delay_microseconds)


def _mixing(deployment: Deployment) -> str:
    """Return why rows mix: golden samples were proven in batches; without any, the graph's nodes decide."""
    return "" if deployment.version.golden else read_mixing(deployment.version.graph_path)


# Ensembles of a store that a model is a step of: they decide how small its largest batch may become.
#
# Source: Triton core, `ValidateEnsembleConfig`: a step that takes batches takes those of its ensemble; a step without
# batches is judged by its shapes alone.


def ensembles_of(model: Path) -> dict[str, int]:
    """The ensembles of the same store that a model is a step of, by name, each with its largest batch."""
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
    """Refuse a model whose configuration the search can neither load nor change.

    Raises:
        RepositoryError: The configuration spreads the model over devices, or Triton schedules whole sequences.
    """
    config, spread = subject.folder / CONFIG_FILE, subject.deployment.settings.parallel
    if spread:
        raise RepositoryError(
            f"{config} spreads '{subject.name}' over devices (parallel: {spread}): its threads, instances and places "
            "follow from that, and are not searched",
            hint="graphkiln explain shows them; a copy without `parallel` can be tuned",
        )
    if subject.schedules_sequences:
        raise RepositoryError(
            f"{config} has Triton schedule sequences: the load of a search is of requests that do not belong together",
            hint="a copy without `sequence_batching` can be tuned, where its graph needs no state",
        )


def check_unchanged(subject: Subject) -> None:
    """Check that config.pbtxt is still the one that was tuned.

    Raises:
        RepositoryError: It was changed.
    """
    if _sha256_of_config(subject.folder) != subject.config_sha256:
        raise RepositoryError(
            f"{subject.folder / CONFIG_FILE} was changed while it was tuned: what was measured is of another one",
            hint="the same command measures the new one",
        )


def _sha256_of_config(model: Path) -> str:
    path = model / CONFIG_FILE
    return sha256_of(path) if path.exists() else ""


def served_versions(subject: Subject, added: Collection[int] = ()) -> list[int]:
    """The versions that a server takes from the model's folder, by its version policy, in ascending order.

    Raises:
        RepositoryError: The configuration is not usable any more.
    """
    config = read_config(subject.folder / CONFIG_FILE)
    return select_versions(config, {*version_folders(subject.folder.iterdir()), *added})


@contextmanager
def vanishing_cache() -> Iterator[ArtifactCache]:
    """Temporary artifact cache, removed when the context ends."""
    with OwnedFolder(prefix="graphkiln-cache-") as folder, ArtifactCache(folder.path) as cache:
        yield cache


# A store with one version of a model and another configuration: what a trial serves. The user's files are linked.

# Begins the names of the temporary folders.
PREFIX = "graphkiln-tune-"


@contextmanager
def stage(subject: Subject, changes: ConfigChanges, version: Path | None = None) -> Iterator[Path]:
    """Create a temporary store with a changed configuration; it is removed when the context ends.

    Raises:
        RepositoryError: The configuration cannot be changed so.
    """
    config = read_config(subject.folder / CONFIG_FILE)
    changes.apply(config)
    config.ClearField("version_policy")  # the version that is tuned is the only one there
    with OwnedFolder(prefix=PREFIX) as folder:
        store = folder.path / "store"
        model = store / subject.name
        write_mirror(subject.folder, model, [] if version else [subject.version], config)
        if version:
            (model / str(subject.version)).symlink_to(version)
            copy_labels(subject.folder, model, config)
        yield store


# `--calibration`: an int8 graph of the model that is tuned, converted and proven as any other, and tried beside it.

_ELSEWHERE = "graphkiln convert SOURCE --precision int8 --calibration PATH makes a version that can be tuned"


def with_int8(subject: Subject, calibration: Path, samples: Path | None, folder: Path) -> Subject:
    """Return the subject with an int8 graph of it, or with the reason if that does not compute the same.

    Raises:
        InvalidInput: The model is saved in another precision than fp32, or answers with more than scores of classes.
        ConversionError: The samples cannot be used, or nothing of the graph becomes int8.
    """
    _check(subject)
    try:
        version = _convert(subject, calibration.absolute(), samples.absolute() if samples else None, folder)
    except VerificationError as error:
        return replace(subject, no_int8=f"does not compute the same: {error}")
    _check_tensors(subject, version)
    return replace(subject, int8=version)


def _check(subject: Subject) -> None:
    saved, contract = subject.deployment.saved, subject.deployment.version.contract
    if saved is not Precision.FP32:
        raise InvalidInput(f"--calibration: the graph was saved in {saved}, and int8 is made of fp32", hint=_ELSEWHERE)
    if contract.ranking or not isinstance(contract.task, Classification | None):
        raise InvalidInput("--calibration: the model answers with more than scores of classes", hint=_ELSEWHERE)


def _convert(subject: Subject, calibration: Path, samples: Path | None, folder: Path) -> Path:
    from graphkiln_converters.convert import convert
    from graphkiln_converters.recipe import Recipe

    folder.mkdir()
    contract = subject.deployment.version.contract
    recipe = Recipe(
        source=str(subject.deployment.version.graph_path),
        name=subject.name,
        model_store=folder / "store",
        keep_names=True,
        preprocess=json.loads(encode_json(contract.preprocess)) if contract.preprocess else None,
        labels=_write_labels(contract, folder),
        batch="free" if subject.signature.batchable else "fixed",
        precision=Precision.INT8,
        calibration=calibration,
        samples=samples,
    )
    return convert(recipe)


def _write_labels(contract: Contract, folder: Path) -> Path | None:
    if not contract.labels:
        return None
    path = folder / "labels.txt"
    path.write_text("".join(f"{label}\n" for label in contract.labels), encoding="utf-8")
    return path


def _check_tensors(subject: Subject, version: Path) -> None:
    """Refuse an int8 graph with other tensors: one config.pbtxt describes both graphs."""
    own, found = subject.signature, read_version_signature(version, "")
    for ours, theirs in ((own.inputs, found.inputs), (own.outputs, found.outputs)):
        if len(ours) != len(theirs) or not all(one.is_like(other) for one, other in zip(ours, theirs, strict=True)):
            raise InvalidInput("--calibration: the int8 graph has other tensors than the model", hint=_ELSEWHERE)
