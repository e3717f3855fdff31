"""The model of a run: found, lowered and proven as the server does it."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.graph.contract import Contract
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.errors import ExecutionError, RepositoryError, SignatureError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import Replay
from graphkiln_backend.lowering.artifacts import Artifacts, Measurement, content_of
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.plan import pick_fastest
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.lowering.warmup import feeds_of
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.repository.model_config import InstanceGroup, ModelConfig
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.repository.publication import check_published, complete_contract
from graphkiln_backend.repository.remote_model import fetch_model
from graphkiln_backend.repository.version import newest_version, read_version_signature
from graphkiln_backend.repository.version_folders import version_folders, version_number
from graphkiln_backend.scoring.encoders import Encoder, choose_encoder
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.reading import Reader
from graphkiln_backend.scoring.scorer import Computation, ImageInput, Scorer, check_names
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFiles

_PARALLEL = "parallel"  # the setting
_ROUNDS = 3  # of measuring batch sizes
_log = logging.getLogger("graphkiln.scoring")


def read_model(request: ScoreRequest, cache: ArtifactCache, cores: int) -> ScoringModel:
    """Find and plan the model of a run.

    Args:
        request: The run.
        cache: Keeps what is converted from the graphs of other frameworks.
        cores: Cores that a worker computes on, beside decoding images on them.

    Raises:
        GraphkilnError: The version is not usable, or does not say how an image becomes its input.
    """
    model = Path(request.model)
    folder = (model / str(request.version) if request.version else newest_version(model)).absolute()
    graph_folder = partial(convert_if_needed, cache=cache)
    completed = complete_config(folder.parent, request.backends, graph_folder, int(folder.name))
    _check_independent(completed, folder)
    config = _for_worker(ModelConfig.from_protobuf(completed, has_gpu=bool(gpus())), request)
    deployment = Deployment.here(folder, config, cache, request.overrides, cores=cores, works_beside=True)
    if deployment.version.graph_path.is_relative_to(folder):
        check_published(completed, folder.parent, int(folder.name), deployment.version)
    contract = complete_contract(deployment.version, completed, folder.parent)
    preprocess = _known_preprocess(contract, folder)
    signature = read_version_signature(graph_folder(folder), config.default_model_filename)
    return ScoringModel(
        folder=folder,
        deployment=deployment,
        contract=contract,
        preprocess=preprocess,
        signature=signature,
        image_input=ImageInput.of(signature, preprocess, config.max_batch_size),
        wants_gpu=ModelConfig.from_protobuf(completed, has_gpu=True).device.is_gpu,
    )


def _for_worker(config: ModelConfig, request: ScoreRequest) -> ModelConfig:
    """A configuration for one worker of several on a machine: one instance, which computes the whole graph.

    Of a model that is served spread over devices, every worker would take the same cores.

    Raises:
        ScoringError: The command line asks for a spread model.
    """
    if any(override.key == _PARALLEL for override in request.overrides):
        raise ScoringError(
            f"--set {_PARALLEL}: each worker of a run computes the whole graph on its own cores",
            hint="leave it out; --workers says how many copies there are",
        )
    group = InstanceGroup(count=1, device=config.device)
    parameters = {key: value for key, value in config.parameters.items() if key != _PARALLEL}
    if len(parameters) < len(config.parameters):
        _log.info("%s: `%s` of config.pbtxt is for serving; workers compute whole graphs", config.name, _PARALLEL)
    return replace(config, instance_groups=(group,), parameters=parameters)


def _known_preprocess(contract: Contract, folder: Path) -> Preprocess:
    if contract.preprocess is None:
        raise ScoringError(
            f"{folder} does not say how an image becomes its input",
            hint='convert it with graphkiln convert --preprocess JSON, or add parameters { key: "preprocess" } to '
            f"{folder.parent.name}/config.pbtxt",
        )
    return contract.preprocess


def _check_independent(config: ModelConfigProto, folder: Path) -> None:
    """Refuse models whose rows are no rows.

    Raises:
        ScoringError: What a request is answered depends on others, or its batches are described by other tensors.
    """
    problem = ""
    if config.HasField("sequence_batching"):
        problem = "its answers depend on earlier requests (sequence_batching)"
    elif config.batch_input or config.batch_output or any(tensor.allow_ragged_batch for tensor in config.input):
        problem = "it takes batches whose rows differ in size (allow_ragged_batch, batch_input)"
    if problem:
        raise ScoringError(f"{folder.parent.name} cannot be scored: {problem}", hint="serve it, and ask it by a client")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringModel:
    """A version, ready to be built.

    Attributes:
        folder: The version folder, as the user has it.
        deployment: The version and its plan on this machine.
        contract: What is known of its images and classes.
        preprocess: How an image becomes its input.
        signature: Signature of its graph.
        image_input: What it takes of images.
        wants_gpu: Whether it runs on a GPU where there is one.
    """

    folder: Path
    deployment: Deployment
    contract: Contract
    preprocess: Preprocess
    signature: Signature
    image_input: ImageInput
    wants_gpu: bool

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.folder.parent.name

    @property
    def version(self) -> int:
        """Number of the version."""
        return int(self.folder.name)

    def build(self, cache: ArtifactCache) -> ProvenSession:
        """Build and prove the session, golden self-test included.

        Raises:
            LoweringError: No session of the plan works.
        """
        return self.deployment.build(cache)

    def scorer(self, proven: ProvenSession, request: ScoreRequest, cores: int, cache: ArtifactCache) -> Scorer:
        """Build the scorer.

        Args:
            proven: What `build` built.
            request: The run.
            cores: Cores of the worker.
            cache: Remembers the fastest batch size.

        Raises:
            ScoringError: The model has no such outputs, or none that can be ranked.
        """
        computation = Computation(
            session=proven.session,
            image_input=self.image_input,
            encoder=self.encoder(request),
            batch_size=self._batch_size(proven, cache),
            model=self.name,
            version=self.version,
            check=partial(check_session, proven.replay),
        )
        return Scorer(computation, Reader(self.preprocess, cores))

    def facts(self, request: ScoreRequest) -> Mapping[str, str]:
        """List what changes an answer: graph, preprocessing, labels, settings, and how answers are written."""
        settings = self.deployment.settings
        lowering = (settings.engine, settings.precision, settings.layout, settings.fallback, settings.options)
        return {
            "model": f"{self.name} {self.version}",
            "graph": repr(sorted(self._content().items())),
            "contract": encode_json(self.contract),
            "lowering": repr((*map(str, lowering), settings.tuning)),
            **request.facts(),
        }

    def configuration(self, request: ScoreRequest) -> str:
        """Digest of the facts: results of two configurations are never mixed."""
        text = repr(sorted(self.facts(request).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def encoder(self, request: ScoreRequest) -> Encoder:
        """Choose the encoder of the outputs.

        Raises:
            ScoringError: The model has no such outputs, or none that can be ranked; or a column that is carried along
                is called like one of the answers.
        """
        encoder = choose_encoder(self.image_input.signature_of_rows(self.signature), self.contract, request)
        check_names([*request.keep_columns, *encoder.schema.names])
        return encoder

    def _batch_size(self, proven: ProvenSession, cache: ArtifactCache) -> int:
        """The fastest of the sizes that the session was proven at; 1 where rows are computed one by one."""
        most = 1 if proven.separate else self.image_input.most_rows
        sizes = [size for size in self.deployment.warmup_batch_sizes if size <= most]
        artifacts = Artifacts(self.deployment.version, self.deployment.saved, cache)
        samples = self.deployment.version.golden or proven.synthetic
        return choose_batch_size(artifacts, proven.session, proven.config, sizes, samples)

    def _content(self) -> Mapping[str, str]:
        """SHA-256 of all that the graph is read from; of what another framework saved, not of what it became here."""
        version = self.deployment.version
        if version.graph_path.is_relative_to(self.folder):
            return content_of(version)
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): sha256_of(path) for path in files}


def describe_session(proven: ProvenSession) -> str:
    """Engine, device, and the precision that was read back from the engine where it could be."""
    config, placement = proven.config, proven.placement
    precision = placement.precision if placement else config.precision
    return f"{config.engine} on {config.device}" + (f" in {precision}" if precision else "")


def with_version(request: ScoreRequest) -> ScoreRequest:
    """The same request with the number of its version; a remote store is only listed.

    Raises:
        RepositoryError: There is no such model, or the store cannot be read.
    """
    if request.version:
        return request
    address = RemoteAddress.parse(str(request.model))
    if address is None:
        return replace(request, version=int(newest_version(Path(request.model)).name))
    numbers = (version_number(path.partition("/")[0]) for path in RemoteFiles(address).list() if "/" in path)
    newest = max((number for number in numbers if number is not None), default=None)
    if newest is None:
        raise RemoteStoreError(f"there is no model at {address}", hint="STORE/NAME, or STORE/NAME:VERSION")
    return replace(request, version=newest)


def with_local_model(request: ScoreRequest, folder: Path) -> ScoreRequest:
    """The same request with a model folder of this node, and the number of its version.

    Where the request names no version, the driver takes the newest one, and every worker the one that the driver took,
    also when another one appears meanwhile.

    Args:
        request: The run.
        folder: Where a model of a remote store is put; it must live as long as the model is used.

    Raises:
        RepositoryError: There is no such model or version, or the store cannot be read.
    """
    request = with_version(request)
    address = RemoteAddress.parse(str(request.model))
    if address:
        version = f"{address.root}/{request.version}"
        fetched = fetch_model(replace(address, root=version, text=f"{address}/{request.version}"), folder)
        return replace(request, model=fetched.parent)
    model = Path(request.model).absolute()
    newest_version(model)  # or says what is wrong with the model
    if not (model / str(request.version)).is_dir():
        there = ", ".join(map(str, version_folders(model.iterdir())))
        raise RepositoryError(f"model '{model.name}' has no version {request.version}", hint=f"it has {there}")
    return replace(request, model=model)


def check_session(replay: Replay | None) -> None:
    """Compute the samples of a session's proof once more. Nothing else may run on it meanwhile.

    A row that fails by itself becomes an error only after that. It does not find a session that answers wrongly without
    failing: for that `worker.Prover` proves it before each commit.

    Args:
        replay: What to prove; None where nothing can be, which proves nothing.

    Raises:
        GraphkilnError: The session fails, or computes something else.
    """
    if replay is None:
        return
    outputs = replay.output_subsets[0]
    replay.judge([replay.run(sample, outputs) for sample in range(len(replay.samples))])


def choose_batch_size(
    artifacts: Artifacts,
    session: Session,
    config: SessionConfig,
    sizes: Sequence[int],
    samples: GoldenSamples | SyntheticInputs | None,
) -> int:
    """The fastest of some batch sizes: measured once for a session on a machine, and kept in the artifact cache.

    More rows are faster only as long as what lies between two operators fits the processor's caches, and they need more
    memory in any case: of sizes that are equally fast the smallest is taken.

    Args:
        artifacts: Artifacts of the version, which keep the choice.
        session: Ready and warm.
        config: What it was built by.
        sizes: Those that it was proven at, ascending.
        samples: Golden samples, or how to make some up; None where neither is known: the largest size is taken then.
    """
    if len(sizes) == 1 or samples is None:
        return sizes[-1]
    conditions = {"batch sizes": str(sizes), "threads": str(config.threads), "spin": str(config.spin)}
    with artifacts.recall_choice([config], conditions) as fact:
        measurement = fact.value
        if measurement is None:
            measurement = measure_sizes(session, sizes, samples)
            fact.keep(measurement)
        return int(measurement.chosen)


def measure_sizes(session: Session, sizes: Sequence[int], samples: GoldenSamples | SyntheticInputs) -> Measurement:
    """Times a session at some batch sizes, which take turns.

    Args:
        session: Ready and warm.
        sizes: Ascending.
        samples: Golden samples, or how to make some up.

    Returns:
        The smallest size whose rows are computed as fast as those of any, within noise, and the rows per second of
        each; a session that fails at a size is not run at larger ones.
    """
    row_s: dict[int, float] = dict.fromkeys(sizes, math.inf)
    for _ in range(_ROUNDS):
        for size in sizes:
            try:
                row_s[size] = min(row_s[size], _time_s(session, samples, size) / size)
            except (ExecutionError, SignatureError):
                break
    timed = {size: seconds for size, seconds in row_s.items() if seconds < math.inf}
    if not timed:
        return Measurement(chosen=str(sizes[0]), rates={})
    chosen = list(timed)[pick_fastest(list(timed.values()))]
    return Measurement(
        chosen=str(chosen), rates={str(size): float(f"{1 / seconds:.4g}") for size, seconds in timed.items()}
    )


def _time_s(session: Session, samples: GoldenSamples | SyntheticInputs, size: int) -> float:
    feeds = feeds_of(samples, session.signature, size)
    begun = time.perf_counter()
    session.run(feeds)
    return time.perf_counter() - begun
