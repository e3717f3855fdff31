"""The model that is tuned, as its folder has it: its configuration, what serves it today, and what it can do."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import promised_signature
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.repository.config import ModelConfigProto, read_config
from graphkiln_backend.repository.config_changes import NO_BATCHER, has_one_group
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.onnx_file import read_mixing
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.repository.version_folders import version_folders
from graphkiln_backend.repository.version_policy import select_versions
from graphkiln_backend.server.run_folder import BACKEND_NAMES
from graphkiln_backend.system.owned_folder import OwnedFolder
from graphkiln_backend.system.resources import usable_cores

# Ensembles of a store that a model is a step of: they decide how small its largest batch may become.
#
# Source: Triton core, `ValidateEnsembleConfig`: a step that takes batches takes those of its ensemble; a step without
# batches is judged by its shapes alone.


def ensembles_of(model: Path) -> dict[str, int]:
    """The ensembles of the same store that a model is a step of, by name, each with its largest batch.

    Args:
        model: The model's folder; its neighbors are read. One whose configuration cannot be read is none.
    """
    found = {}
    for path in sorted(model.parent.glob(f"[!.]*/{CONFIG_FILE}")):
        try:
            config = read_config(path)
        except RepositoryError:
            continue
        if any(step.model_name == model.name for step in config.ensemble_scheduling.step):
            found[path.parent.name] = int(config.max_batch_size)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A version of a model, and how it is served as it stands.

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
        """Of the model."""
        return self.folder.name

    @property
    def signature(self) -> Signature:
        """The tensors that requests hold."""
        return promised_signature(self.deployment.version)


def read_subject(version: Path, cache: ArtifactCache) -> Subject:
    """Reads a version as the server would.

    Args:
        version: The version folder.
        cache: Keeps what is converted from the graphs of other frameworks.

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


def check_tunable(subject: Subject) -> None:
    """Refuses what no load of a search can measure, or no key of it may change.

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
    """Makes sure that a model has the configuration still that it was tuned with.

    Raises:
        RepositoryError: It has another one.
    """
    if _sha256_of_config(subject.folder) != subject.config_sha256:
        raise RepositoryError(
            f"{subject.folder / CONFIG_FILE} was changed while it was tuned: what was measured is of another one",
            hint="the same command measures the new one",
        )


def served_versions(subject: Subject, added: Collection[int] = ()) -> list[int]:
    """The versions that a server takes from the model's folder, by its version policy, in ascending order.

    Args:
        subject: The model.
        added: Versions that will be there, too.

    Raises:
        RepositoryError: The configuration is not usable any more.
    """
    config = read_config(subject.folder / CONFIG_FILE)
    return select_versions(config, {*version_folders(subject.folder.iterdir()), *added})


def complete_for(version: Path, cache: ArtifactCache) -> ModelConfigProto:
    """A model's configuration, completed for one version alone.

    Raises:
        RepositoryError: The configuration or the graph is not usable.
    """
    number = int(version.name)
    return complete_config(version.parent, BACKEND_NAMES, partial(convert_if_needed, cache=cache), number, [number])


@contextmanager
def vanishing_cache() -> Iterator[ArtifactCache]:
    """An artifact cache that is gone afterwards."""
    with OwnedFolder(prefix="graphkiln-cache-") as folder, ArtifactCache(folder.path) as cache:
        yield cache


def _sha256_of_config(model: Path) -> str:
    path = model / CONFIG_FILE
    return sha256_of(path) if path.exists() else ""


def _queue_delay(config: ModelConfigProto) -> int:
    if not config.HasField("dynamic_batching") or config.max_batch_size < 2:
        return NO_BATCHER
    return int(config.dynamic_batching.max_queue_delay_microseconds)


def _mixing(deployment: Deployment) -> str:
    """Golden samples were proven in batches; of a graph without any, its nodes tell as much as is sure."""
    return "" if deployment.version.golden else read_mixing(deployment.version.graph_path)
