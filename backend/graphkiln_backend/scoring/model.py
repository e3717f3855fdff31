"""The model of a run: find, lower and prove it as the server does."""

from __future__ import annotations

import hashlib
import logging
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.engines.timing import pick_fastest
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
from graphkiln_backend.scoring.scorer import ImageInput, Scorer, check_names
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFiles
from graphkiln_backend.system.resources import usable_cores

_PARALLEL = "parallel"  # name of the setting
_ROUNDS = 3  # of the measurement of batch sizes
# Such a run is long enough to average what else the machine does, and is not repeated: three rounds of ResNet-50 at up
# to 32 rows took as long as scoring 190 of its images.
_LONG_RUN_S = 0.25
# Of each batch outside the session, while the session waits. ResNet-50 on two cores: 13.7 s for 320 images one by one,
# 12.6 s in batches of 4 and 12.4 s in batches of 8, although the session alone takes as long for each.
_BETWEEN_BATCHES_S = 0.004
_log = logging.getLogger("graphkiln.scoring")


def read_model(request: ScoreRequest, cache: ArtifactCache, cores: int) -> ScoringModel:
    """Find and plan the model of a run.

    Args:
        request: The run.
        cache: Stores graphs converted from other frameworks.
        cores: Cores of a worker, which also decodes images on them.

    Raises:
        GraphkilnError: The version is not usable, or its preprocessing is unknown.
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
    if contract.preprocess is None:
        raise ScoringError(
            f"the preprocessing of {folder} is unknown",
            hint='convert it with graphkiln convert --preprocess JSON, or add parameters { key: "preprocess" } to '
            f"{folder.parent.name}/config.pbtxt",
        )
    signature = read_version_signature(graph_folder(folder), config.default_model_filename)
    return ScoringModel(
        folder=folder,
        deployment=deployment,
        contract=contract,
        preprocess=contract.preprocess,
        signature=signature,
        image_input=ImageInput.of(signature, contract.preprocess, config.max_batch_size),
        wants_gpu=ModelConfig.from_protobuf(completed, has_gpu=True).device.is_gpu,
    )


def read_run_model(request: ScoreRequest, folder: Path) -> tuple[ScoreRequest, ScoringModel]:
    """Fetch and read the model of a run; workers read it again.

    A graph of another framework is converted into the cache of the run, where workers of this machine find it.

    Args:
        request: The run.
        folder: Temporary folder for a fetched model and a temporary cache.

    Returns:
        The request with its version number, and the model.

    Raises:
        GraphkilnError: There is no such version, its preprocessing is unknown, or it lacks a requested output.
    """
    with CacheSettings(folder=request.cache).checked().open(folder / "cache") as cache:
        local = with_local_model(request, folder)
        model = read_model(local, cache, usable_cores())
        model.encoder(local)
        return replace(request, version=local.version), model


def _for_worker(config: ModelConfig, request: ScoreRequest) -> ModelConfig:
    """Return a configuration with a single instance that computes the whole graph.

    If the model were spread over cores as in serving, all workers of a machine would use the same cores.

    Raises:
        ScoringError: The request asks for a spread model.
    """
    if any(override.key == _PARALLEL for override in request.overrides):
        raise ScoringError(
            f"--set {_PARALLEL}: each worker of a run computes the whole graph on its own cores",
            hint="leave it out; --workers sets the number of copies",
        )
    group = InstanceGroup(count=1, device=config.device)
    parameters = {key: value for key, value in config.parameters.items() if key != _PARALLEL}
    if len(parameters) < len(config.parameters):
        _log.info("%s: `%s` in config.pbtxt is ignored: workers compute whole graphs", config.name, _PARALLEL)
    return replace(config, instance_groups=(group,), parameters=parameters)


def _check_independent(config: ModelConfigProto, folder: Path) -> None:
    """Refuse models whose answer for a row depends on other rows or requests."""
    problem = ""
    if config.HasField("sequence_batching"):
        problem = "its answers depend on earlier requests (sequence_batching)"
    elif config.batch_input or config.batch_output or any(tensor.allow_ragged_batch for tensor in config.input):
        problem = "its batches have rows of different sizes (allow_ragged_batch, batch_input)"
    if problem:
        raise ScoringError(f"{folder.parent.name} cannot be scored: {problem}", hint="serve it and use a client")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoringModel:
    """A version and its lowering plan on this machine.

    Attributes:
        folder: The version folder of the user.
        wants_gpu: True if it uses a GPU where there is one.
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
        """Model name."""
        return self.folder.parent.name

    @property
    def version(self) -> int:
        """Version number."""
        return int(self.folder.name)

    def scorer(self, proven: ProvenSession, request: ScoreRequest, cores: int, cache: ArtifactCache) -> Scorer:
        """Build the scorer of a session.

        Args:
            proven: The session, built by `deployment`.
            request: The run.
            cores: Cores of the worker.
            cache: Stores the fastest batch size.

        Raises:
            ScoringError: The model lacks a requested output, or has no scores.
        """
        return Scorer(
            proven.session,
            Reader(self.preprocess, cores),
            image_input=self.image_input,
            encoder=self.encoder(request),
            batch_size=self._batch_size(proven, cache),
            model=(self.name, self.version),
            check=partial(check_session, proven.replay),
        )

    def facts(self, request: ScoreRequest) -> Mapping[str, str]:
        """Return everything that changes an answer: graph, preprocessing, labels, settings, output columns."""
        settings = self.deployment.settings
        lowering = (settings.engine, settings.precision, settings.layout, settings.fallback, settings.options)
        tuning = replace(settings.tuning, memory_pattern=True)  # changes no answer; fixed in digests of older runs
        return {
            "model": f"{self.name} {self.version}",
            "graph": repr(sorted(self._content().items())),
            "contract": encode_json(self.contract),
            "lowering": repr((*map(str, lowering), tuning)),
            **request.facts(),
        }

    def configuration(self, request: ScoreRequest) -> str:
        """Return the digest of the facts; results of two configurations are never mixed."""
        text = repr(sorted(self.facts(request).items()))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def encoder(self, request: ScoreRequest) -> Encoder:
        """Choose the encoder of the outputs.

        Raises:
            ScoringError: The model lacks a requested output or has no scores, or a column of the input has the name of
                an output column.
        """
        encoder = choose_encoder(self.image_input.signature_of_rows(self.signature), self.contract, request)
        check_names([*request.keep_columns, *encoder.schema.names])
        return encoder

    def _batch_size(self, proven: ProvenSession, cache: ArtifactCache) -> int:
        """Return the fastest batch size at which the session was proven; 1 if rows are computed one by one."""
        most = 1 if proven.separate else self.image_input.max_rows
        sizes = [size for size in self.deployment.warmup_batch_sizes if size <= most]
        artifacts = Artifacts(self.deployment.version, self.deployment.saved, cache)
        samples = self.deployment.version.golden or proven.synthetic
        return choose_batch_size(artifacts, proven.session, proven.config, sizes, samples)

    def _content(self) -> Mapping[str, str]:
        """Return SHA-256 digests of the model's files; of the original files if the graph is converted."""
        version = self.deployment.version
        if version.graph_path.is_relative_to(self.folder):
            return content_of(version)
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        return {str(path.relative_to(self.folder)): sha256_of(path) for path in files}


def describe_session(proven: ProvenSession) -> str:
    """Return engine, device, and the precision, as read back from the engine if possible."""
    config, placement = proven.config, proven.placement
    precision = placement.precision if placement else config.precision
    return f"{config.engine} on {config.device}" + (f" in {precision}" if precision else "")


def with_version(request: ScoreRequest) -> ScoreRequest:
    """Set the version of a request to the newest one if it has none; a remote store is listed, not fetched.

    Raises:
        RepositoryError: The model does not exist, or the store cannot be read.
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
    """Set the version of a request, and fetch its model from a remote store.

    The driver pins the version for all workers, even if a newer one is published during the run.

    Args:
        request: The run.
        folder: Folder for a fetched model.

    Raises:
        RepositoryError: The model or version does not exist, or the store cannot be read.
    """
    request = with_version(request)
    address = RemoteAddress.parse(str(request.model))
    if address:
        version = f"{address.root}/{request.version}"
        fetched = fetch_model(replace(address, root=version, text=f"{address}/{request.version}"), folder)
        return replace(request, model=fetched.parent)
    model = Path(request.model).absolute()
    newest_version(model)  # raises if it is not a model
    if not (model / str(request.version)).is_dir():
        there = ", ".join(map(str, version_folders(model.iterdir())))
        raise RepositoryError(f"model '{model.name}' has no version {request.version}", hint=f"it has {there}")
    return replace(request, model=model)


def check_session(replay: Replay | None) -> None:
    """Replay all samples of a session; call it while nothing else runs on the session.

    A row that fails alone becomes an error only after this check. Wrong answers without a failure are found by
    `loaded_model.Prover`, before each commit.

    Raises:
        GraphkilnError: The session fails, or computes wrong answers.
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
    """Return the fastest batch size, measured once per session and machine and stored in the artifact cache.

    Larger batches are faster only while the data between two operators fits into the CPU caches, and they need more
    memory: the smallest of equally fast sizes is chosen.

    Args:
        artifacts: Artifacts of the version, which store the choice.
        session: Warm session.
        config: Configuration of the session.
        sizes: Sizes at which it was proven, ascending.
        samples: Golden or synthetic samples; None to choose the largest size without a measurement.
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
    """Measure batch sizes in turn, the short runs several times.

    Returns:
        The smallest size that is as fast per row as any other, within noise, with the time between two batches; and
        the rows per second of the session alone by size.
        Sizes above one at which the session fails are not measured.
    """
    row_s: dict[int, float] = dict.fromkeys(sizes, math.inf)
    repeated = list(sizes)
    for _ in range(_ROUNDS):
        for size in repeated:
            try:
                feeds = feeds_of(samples, session.signature, size)
                begun = time.perf_counter()
                session.run(feeds)
                row_s[size] = min(row_s[size], (time.perf_counter() - begun) / size)
            except (ExecutionError, SignatureError):
                break
        repeated = [size for size in repeated if size * row_s[size] < _LONG_RUN_S]
    timed = {size: seconds for size, seconds in row_s.items() if seconds < math.inf}
    if not timed:
        return Measurement(chosen=str(sizes[0]), rates={})
    chosen = list(timed)[pick_fastest([seconds + _BETWEEN_BATCHES_S / size for size, seconds in timed.items()])]
    return Measurement(
        chosen=str(chosen), rates={str(size): float(f"{1 / seconds:.4g}") for size, seconds in timed.items()}
    )
