"""Build one session and verify it: signature, placement, golden outputs alone and in the largest batch.

Golden samples are replayed, or a synthetic request is made, at every start. Results that depend only on the graph, the
engine's release and the processor are cached as `artifacts.OBSERVATIONS`: the placement (which takes a second session),
whether rows may share a batch, and the batch sizes worth warming up.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from graphkiln_backend.engines.base import REWRITES_OFF, Engine, NotedSession, Placement, Session, SessionConfig
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine, open_reference, reference_engine
from graphkiln_backend.graph.errors import (
    EngineUnavailable,
    ExecutionError,
    GraphkilnError,
    LoweringError,
    VerificationError,
)
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.lowering.acceptance import (
    Replay,
    Requirements,
    check_golden,
    check_placement,
    check_signature,
    limits_of,
    promised_signature,
)
from graphkiln_backend.lowering.artifacts import Artifacts, Observations
from graphkiln_backend.lowering.output_subsets import SubsetSession, build_subset
from graphkiln_backend.lowering.trial import (
    SyntheticInputs,
    Trial,
    check_repeats,
    find_mixed_rows,
    try_as_saved,
    try_beside,
)
from graphkiln_backend.lowering.warmup import WarmUp, repeat_warm_up, warm_up
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.repository.onnx_file import read_mixing
from graphkiln_backend.repository.openvino_ir import read_ir
from graphkiln_backend.repository.training_mode import EVALUATION_MODE, draws_numbers, find_training
from graphkiln_backend.repository.version import GraphFormat

_log = logging.getLogger("graphkiln.lowering")

WARM_UP = "warm-up"  # name of the phase
_UNCOMPARED = (
    "it has no golden samples, and only OpenVINO reads OpenVINO IR: its outputs were compared with nothing; "
    "graphkiln adopt adds samples"
)


class Phases:
    """Stopwatch for the phases of a start, which do not overlap.

    Attributes:
        seconds: Seconds of each phase so far, in order of their first start.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the block to a phase."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """Measurement behind a choice between candidates.

    Attributes:
        chosen: Name of the candidate that serves.
        rates: Samples per second by candidate; empty if the graph could not be run.
        batch: Batch size.
        machine: Processor or GPU and a digest of its instruction sets; another machine measures again.
        measured_at: Time in UTC, ISO 8601.
        remembered: Whether the measurement comes from the cache.
    """

    chosen: str
    rates: dict[str, float]
    batch: int
    machine: str
    measured_at: str
    remembered: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenSession:
    """A verified session.

    Attributes:
        session: The session, warm; owned by the holder of this object.
        config: Its configuration.
        placement: Kernels that ran, or None if the graph failed on every synthetic request.
        self_test: Verdict on the golden samples; None without samples or with `self_test: off`.
        failures: Errors of configurations that were tried before.
        slower: Candidates that work and are slower, a line each.
        basis: Measurement behind the choice; None if there was only one candidate.
        phases: Seconds of each phase.
        notes: Notes for the user.
        replay: Replays that verify the session while it serves; None with `self_test: off` or without usable samples.
        synthetic: Inputs that the graph accepts; None if there are golden samples, or no such inputs were found.
        separate: Whether requests must not share a batch, because the graph mixes its rows.
    """

    session: Session
    config: SessionConfig
    placement: Placement | None
    self_test: Verification | None
    failures: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()
    basis: Basis | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    replay: Replay | None = None
    synthetic: SyntheticInputs | None = None
    separate: bool = False

    @property
    def warmup_s(self) -> float:
        """Seconds of the warm-up."""
        return self.phases.get(WARM_UP, 0.0)


def build_proven_session(artifacts: Artifacts, config: SessionConfig, requirements: Requirements) -> ProvenSession:
    """Build, verify and warm up a session; once more without ONNX Runtime's own rewrites if a saved graph fails.

    Raises:
        EngineUnavailable: The engine is not installed, or cannot run on the device.
        GraphkilnError: The session cannot be built, or fails its verification; it is closed.
    """
    try:
        return _build_proven(artifacts, config, requirements)
    except (ExecutionError, LoweringError, VerificationError) as error:
        as_saved = config.precision in (None, artifacts.saved) and not config.splits
        if config.engine != REFERENCE_ENGINE or config.tuning.graph_level == "off" or config.providers or not as_saved:
            raise
        try:
            proven = _build_proven(artifacts, config.without_rewrites(), requirements)
        except GraphkilnError:
            raise error from None
        return replace(proven, notes=(f"{REWRITES_OFF}: {error}", *proven.notes))


def _build_proven(artifacts: Artifacts, config: SessionConfig, requirements: Requirements) -> ProvenSession:
    phases = Phases()
    with phases.measure("engine"):
        engine = load_engine(config.engine)
        support = engine.probe(config.device)
    if not support.ok:
        raise EngineUnavailable(support.reason)
    session = _build_session(engine, artifacts, config, phases)
    try:
        proven = _Proof(session, engine, artifacts, config, requirements, phases).run()
        is_onnx = artifacts.version.format is GraphFormat.ONNX
        if len(session.signature.outputs) == 1 or config.splits or not is_onnx:  # a pass drops unused outputs
            return proven
        build = partial(
            build_subset,
            graph=artifacts.prepare_graph(config),
            engine=engine,
            config=config,
            artifacts=artifacts,
            requirements=requirements,
            synthetic=proven.synthetic,
        )
        subsets = SubsetSession(session, build)
        return replace(proven, session=subsets, replay=proven.replay and replace(proven.replay, session=subsets))
    except BaseException:
        session.close()
        raise


def _build_session(engine: Engine, artifacts: Artifacts, config: SessionConfig, phases: Phases) -> Session:
    """Build a session from the cached compiled graph if there is one, otherwise from the graph."""
    if config.splits:
        from graphkiln_backend.lowering.parallel.building import build_split  # few models are split
        from graphkiln_backend.lowering.parallel.parts import prepare_parts

        with phases.measure("artifacts"):
            parts = prepare_parts(artifacts, engine, config)
        with phases.measure("session"):
            return build_split(engine, parts, config, promised_signature(artifacts.version))
    with phases.measure("artifacts"):
        compiled = artifacts.prepare_compiled(engine, config)
        graph = artifacts.prepare_graph(config)
    with phases.measure("session"):
        return engine.build(graph, config, compiled)


@dataclass(slots=True)
class _Proof:
    """Verification of one session; `known` are the observations of an earlier start."""

    session: Session
    engine: Engine
    artifacts: Artifacts
    config: SessionConfig
    requirements: Requirements
    phases: Phases
    known: Observations = field(default_factory=Observations)

    def run(self) -> ProvenSession:
        _log.info("proving %s", self.config)
        version, measure = self.artifacts.version, self.phases.measure
        golden = version.golden
        limits = limits_of(self.artifacts.saved, self.config, version.adoption)
        with measure("signature"):
            check_signature(version, self.session.signature)
        with (
            measure("observations"),
            self.artifacts.recall_observations(self.engine, self.config, self._conditions) as fact,
        ):
            # The lock is not kept: instances that start together for the first time all observe, side by side.
            self.known = (fact and fact.value) or Observations()
        with measure("trial"):
            trial = Trial(None) if golden else self._try_out(limits)
        with measure("placement"):
            placement = self.known.placed or self._read_placement(trial.synthetic)
        notes = check_placement(self.config, placement, self.artifacts.saved)
        self_test = None
        with measure("golden replay"):
            if golden and self.requirements.self_test:
                largest, shuffle = self.requirements.largest_batch, self.config.splits
                self_test = check_golden(self.session, golden, limits, largest, version.reading, shuffle=shuffle)
        if golden and not self_test:
            notes = (*notes, "self_test: off: the golden samples were not replayed")
        with measure(WARM_UP):
            warmed = self._warm_up(trial.synthetic, replayed=self_test is not None)
        with measure("replays"):
            replays = self._prepare_replays(trial, limits)
        if trial.synthetic and self.requirements.self_test and not replays:
            notes = (*notes, "nothing is replayed while it serves: the outputs of a synthetic request do not repeat")
        with measure("rows"):
            why_separate = self._find_mixed_rows(trial.synthetic, limits)
        if not self.known.complete:
            with measure("observations"):
                self._remember(placement, why_separate, warmed, repeats=replays is not None)
        separate_note = why_separate and f"requests are computed one by one: {why_separate}"
        uncompared = "" if golden or version.format is GraphFormat.ONNX else _UNCOMPARED
        built = self.session.notes if isinstance(self.session, NotedSession) else ()
        lines = (*map(str, self.artifacts.replaced), *built, *notes, uncompared, trial.note, warmed.note, separate_note)
        return ProvenSession(
            session=self.session,
            config=self.config,
            placement=placement,
            self_test=self_test,
            phases=self.phases.seconds,
            notes=tuple(filter(None, lines)),
            replay=replays,
            synthetic=trial.synthetic,
            separate=bool(why_separate),
        )

    def _try_out(self, limits: Limits) -> Trial:
        """Make synthetic requests to a session without golden samples."""
        artifacts, config = self.artifacts, self.config
        graph = artifacts.prepare_graph(replace(config, precision=None))
        open_saved = partial(open_reference, op_libraries=config.op_libraries)
        plain = config.engine == reference_engine(graph) and not config.splits and not config.providers
        as_saved = plain and config.precision in (None, artifacts.saved)
        if self.requirements.self_test and not as_saved:
            trial = try_beside(self.session, graph, open_saved, limits)
        else:
            trial = try_as_saved(self.session, graph, open_saved)
        if trial.synthetic and not self.known.complete and not self._draws_numbers:
            check_repeats(self.session, trial.synthetic, limits)
        return trial

    @property
    def _draws_numbers(self) -> bool:
        """True if equal requests may get different responses."""
        version = self.artifacts.version
        is_ir = version.format is GraphFormat.OPENVINO_IR
        return read_ir(version.graph_path).draws_numbers if is_ir else draws_numbers(version.graph_path)

    def _read_placement(self, synthetic: SyntheticInputs | None) -> Placement | None:
        if golden := self.artifacts.version.golden:
            return self.session.placement(golden.inputs)
        return self.session.placement(synthetic.feeds(self.session.signature)) if synthetic else None

    def _warm_up(self, synthetic: SyntheticInputs | None, *, replayed: bool) -> WarmUp:
        samples = self.artifacts.version.golden or synthetic
        if samples is None:
            return WarmUp()
        if self.known.warmed is not None:
            return repeat_warm_up(self.session, self.known.warmed, samples)
        sizes, on_gpu = self.requirements.batch_sizes, self.config.device.is_gpu
        return warm_up(self.session, sizes, samples, everything=on_gpu, already=replayed)

    def _prepare_replays(self, trial: Trial, limits: Limits) -> Replay | None:
        version, numbers = self.artifacts.version, self.config.parallel
        if not self.requirements.self_test:
            return None
        # If parts of a batch are computed in parallel, a batch is replayed as well, so that all parts are busy.
        splits = numbers is not None and numbers.pipeline > 1 and numbers.micro_batches > 1
        whole = version.golden is not None and version.golden.whole
        together = self.requirements.largest_batch if splits and not whole else 1
        if version.golden:
            return Replay.of_golden(self.session, version.golden, limits, version.reading, together=together)
        synthetic = trial.synthetic
        if synthetic is None or (self.known.complete and not self.known.repeats):
            return None
        feeds = synthetic.feeds(self.session.signature, together)
        earlier = trial.outputs if together == 1 else None
        return Replay.recorded(self.session, limits, feeds, runs=2 if self.known.complete else 3, earlier=earlier)

    def _find_mixed_rows(self, synthetic: SyntheticInputs | None, limits: Limits) -> str:
        """Return the reason why requests must not share a batch, or empty.

        Raises:
            LoweringError: Parts of a batch would be computed in parallel, and its rows depend on each other.
        """
        version, config = self.artifacts.version, self.config
        if version.golden:
            # Already verified: by the conversion at several batch sizes, and by `check_golden` on this session, alone
            # and in the largest batch. With `self_test: off` the conversion's proof has to suffice.
            return ""
        if self.known.complete:
            return self.known.mixed
        is_onnx = version.format is GraphFormat.ONNX  # OpenVINO IR has no training mode
        reason = find_training(version.graph_path) if is_onnx else ""
        if reason:
            reason += (
                f" in training mode, which makes rows depend on each other or on random numbers; {EVALUATION_MODE}"
            )
        if self.requirements.largest_batch < 2:
            return reason
        counted = [spec.name for spec in promised_signature(version).outputs if spec.varies != spec.batchable]
        by_values = f"output '{counted[0]}' has a length that depends on values" if counted else ""
        reason = reason or (read_mixing(version.graph_path) if is_onnx else "") or by_values
        reason = reason or find_mixed_rows(self.session, synthetic, limits)
        cuts = config.streams > 1 or (config.parallel is not None and config.parallel.micro_batches > 1)
        if not cuts:
            return reason
        if not reason:  # streams split every batch, so that this session cannot show what the graph mixes
            saved = self.artifacts.prepare_graph(replace(config, precision=None))
            with open_reference(saved, config.op_libraries) as reference:
                reason = find_mixed_rows(reference, synthetic, limits)
        if reason:
            streams = "leave `streams` out, or disable batching: max_batch_size: 0"
            stages = "write micro_batches=1, so that the stages take turns"
            raise LoweringError(
                f"{config} cannot compute parts of a batch in parallel",
                attempts=(reason,),
                hint=streams if config.streams > 1 else stages,
            )
        return ""

    @property
    def _conditions(self) -> dict[str, str]:
        """Conditions of the observations beside graph, engine and session configuration."""
        golden = self.artifacts.version.golden is not None
        return {
            "batches": f"{self.requirements.batch_sizes}",
            "proof": f"{self.requirements.self_test}, golden: {golden}",
        }

    def _remember(self, placement: Placement | None, why_separate: str, warmed: WarmUp, *, repeats: bool) -> None:
        observations = Observations(
            complete=True,
            placed=placement,
            mixed=why_separate,
            repeats=repeats,
            warmed=None if warmed.note else warmed.sizes,
        )
        with self.artifacts.recall_observations(self.engine, self.config, self._conditions) as fact:
            if fact:
                fact.keep(observations)
