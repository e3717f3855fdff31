"""Build one session and prove it: its tensors, what really ran, the golden outputs alone and in the largest batch.

The golden samples are replayed, or a request is made, at every start. What follows from the graph, the engine's release
and the processor alone is found out once and remembered (`remembered.OBSERVATIONS`): which kernels run, which takes a
second session to see; whether rows may share a batch; which batch sizes pay for being run ahead.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial

from graphkiln_backend.engines.base import Engine, Placement, Session, SessionConfig
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine, open_reference
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.lowering.acceptance import (
    Requirements,
    check_golden,
    check_golden_shuffled,
    check_placement,
    check_signature,
    limits_of,
    promised_signature,
    read_placement,
)
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.output_subsets import SubsetSession, build_subset
from graphkiln_backend.lowering.remembered import Observations
from graphkiln_backend.lowering.replaying import Replay
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
from graphkiln_backend.repository.training_mode import EVALUATION_MODE, draws_numbers, find_training

_log = logging.getLogger("graphkiln.lowering")

WARM_UP = "warm-up"  # the phase


class Phases:
    """A stopwatch for the phases of a start, which do not overlap.

    Attributes:
        seconds: Seconds of each phase so far, in the order in which they first began.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time that the block takes to a phase, however it ends."""
        begun = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begun


@dataclass(frozen=True, kw_only=True, slots=True)
class Basis:
    """Basis of a choice between candidates.

    Attributes:
        chosen: Name of the candidate that serves.
        rates: Samples per second of each candidate; empty where the graph could not be run.
        batch: The batch size.
        machine: The processor or GPU, and a digest of its instruction sets: on another one all are measured again.
        measured_at: Time in UTC, ISO 8601.
        remembered: Whether an earlier start measured it.
    """

    chosen: str
    rates: dict[str, float]
    batch: int
    machine: str
    measured_at: str
    remembered: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenSession:
    """A session that may serve.

    Attributes:
        session: Ready and warm; owned by the holder of this.
        config: Configuration that it was built by.
        placement: Kernels that ran, or None where the graph could not be run on synthetic inputs.
        self_test: Verdict of the golden samples, or None for a version that has none, or with `self_test: off`.
        failures: One line per configuration that failed before this one.
        slower: One line per candidate that works and is not the fastest.
        basis: Basis of the choice between candidates; None where there was only one.
        phases: Seconds of each phase of building and proving it.
        notes: Notes for a person, such as why warming up stopped early, or what is computed otherwise than saved.
        replay: Proves it again while it serves; None with `self_test: off`, and where nothing can be replayed.
        synthetic: Inputs that it computes; None where golden samples are there, or none are known.
        separate: Whether requests must be computed one by one, because the graph mixes the rows of a batch.
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
        """Seconds that warming up took."""
        return self.phases.get(WARM_UP, 0.0)


def build_proven_session(artifacts: Artifacts, config: SessionConfig, requirements: Requirements) -> ProvenSession:
    """Build, prove and warm a session.

    Args:
        artifacts: Artifacts of the version.
        config: Its configuration.
        requirements: Requirements on it.

    Raises:
        EngineUnavailable: The engine is not installed, or cannot run on the device.
        GraphkilnError: The session cannot be built, or fails its proof; it is closed.
    """
    phases = Phases()
    with phases.measure("engine"):
        engine = load_engine(config.engine)
        support = engine.probe(config.device)
    if not support.ok:
        raise EngineUnavailable(support.reason)
    session = _build_session(engine, artifacts, config, phases)
    try:
        proven = _Proof(session, engine, artifacts, config, requirements, phases).run()
        if len(session.signature.outputs) == 1 or config.splits:
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
    """Build a session from what was compiled where that is kept, else from the graph."""
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
    session: Session
    engine: Engine
    artifacts: Artifacts
    config: SessionConfig
    requirements: Requirements
    phases: Phases
    known: Observations = field(default_factory=Observations)  # by an earlier start

    def run(self) -> ProvenSession:
        _log.info("proving %s", self.config)
        version, measure = self.artifacts.version, self.phases.measure
        limits = limits_of(self.artifacts.saved, self.config)
        with measure("signature"):
            check_signature(version, self.session.signature)
            self._recall()
        with measure("trial"):
            trial = Trial(None) if version.golden else self._try_out(limits)
        with measure("placement"):
            placement = self._read_placement(trial.synthetic)
        notes = check_placement(self.config, placement, self.artifacts.saved)
        with measure("golden replay"):
            self_test = self._check_golden(limits)
        if version.golden and not self_test:
            notes = (*notes, "self_test: off: the golden samples were not replayed")
        with measure(WARM_UP):
            warmed = self._warm_up(trial.synthetic, replayed=self_test is not None)
        with measure("replays"):
            replays = self._prepare_replays(trial, limits)
        with measure("rows"):
            why_separate = self._find_mixed_rows(trial.synthetic, limits)
        if not self.known.complete:
            with measure("observations"):
                self._remember(placement, why_separate, warmed, repeats=replays is not None)
        separate_note = why_separate and f"requests are computed one by one: {why_separate}"
        lines = (*map(str, self.artifacts.replaced), *notes, trial.note, warmed.note, separate_note)
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
        """Make a request of a session whose version has no golden samples."""
        artifacts, config = self.artifacts, self.config
        graph = artifacts.prepare_graph(replace(config, precision=None))
        open_saved = partial(open_reference, op_libraries=config.op_libraries)
        plain = config.engine == REFERENCE_ENGINE and not config.splits
        as_saved = plain and config.precision in (None, artifacts.saved)
        if self.requirements.self_test and not as_saved:
            trial = try_beside(self.session, graph, open_saved, limits)
        else:
            trial = try_as_saved(self.session, graph, open_saved)
        if trial.synthetic and not self.known.complete and not draws_numbers(artifacts.version.graph_path):
            check_repeats(self.session, trial.synthetic, limits)
        return trial

    def _read_placement(self, synthetic: SyntheticInputs | None) -> Placement | None:
        if self.known.placed:
            return self.known.placed
        return read_placement(self.session, self.artifacts.version.golden, synthetic)

    def _check_golden(self, limits: Limits) -> Verification | None:
        version, largest = self.artifacts.version, self.requirements.largest_batch
        if not (version.golden and self.requirements.self_test):
            return None
        verdict = check_golden(self.session, version.golden, limits, largest, version.reading)
        if self.config.splits:
            check_golden_shuffled(self.session, version.golden, limits, largest, version.reading)
        return verdict

    def _warm_up(self, synthetic: SyntheticInputs | None, *, replayed: bool) -> WarmUp:
        samples = self.artifacts.version.golden or synthetic
        if samples is None:
            return WarmUp()
        if self.known.warmed is not None:
            return repeat_warm_up(self.session, self.known.warmed, samples)
        sizes, on_gpu = self.requirements.batch_sizes, self.config.device.is_gpu
        return warm_up(self.session, sizes, samples, everything=on_gpu, already=replayed)

    def _prepare_replays(self, trial: Trial, limits: Limits) -> Replay | None:
        """Prepare to prove the session again while it serves."""
        version, numbers = self.artifacts.version, self.config.parallel
        if not self.requirements.self_test:
            return None
        # Where parts of a batch are computed side by side, a batch is replayed, too, so that all of them are under way.
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
        """Find out why the rows of several requests are computed one by one; empty where they may share a batch.

        Raises:
            LoweringError: Parts of a batch would be computed side by side, and its rows depend on each other.
        """
        version, config = self.artifacts.version, self.config
        if version.golden:
            # Checked already: the conversion proved the graph at several batch sizes, and `_check_golden` compared the
            # samples alone and in the largest batch with the saved outputs, on this session, which cuts that batch up
            # as it will those of requests. With `self_test: off` the conversion's proof must do.
            return ""
        if self.known.complete:
            return self.known.mixed
        reason = find_training(version.graph_path)
        if reason:
            reason += f" in training mode, where a row depends on the others or on chance; {EVALUATION_MODE}"
        if self.requirements.largest_batch < 2:
            return reason
        counted = [spec.name for spec in promised_signature(version).outputs if spec.varies != spec.batchable]
        by_values = f"output '{counted[0]}' is as long as its values say" if counted else ""
        reason = reason or read_mixing(version.graph_path) or by_values
        reason = reason or find_mixed_rows(self.session, synthetic, limits)
        cuts = config.streams > 1 or (config.parallel is not None and config.parallel.micro_batches > 1)
        if not cuts:
            return reason
        if not reason:  # streams cut every batch up, so that the session itself cannot show what the graph mixes
            saved = self.artifacts.prepare_graph(replace(config, precision=None))
            with open_reference(saved, config.op_libraries) as reference:
                reason = find_mixed_rows(reference, synthetic, limits)
        if reason:
            streams = "leave `streams` out, or let each request be computed whole: max_batch_size: 0"
            stages = "write micro_batches=1: the stages then take turns"
            raise LoweringError(
                f"{config} cannot compute parts of a batch side by side",
                attempts=(reason,),
                hint=streams if config.streams > 1 else stages,
            )
        return ""

    @property
    def _conditions(self) -> dict[str, str]:
        """Conditions of the observations beside graph, engine and session."""
        golden = self.artifacts.version.golden is not None
        return {
            "batches": f"{self.requirements.batch_sizes}",
            "proof": f"{self.requirements.self_test}, golden: {golden}",
        }

    def _recall(self) -> None:
        with self.artifacts.recall_observations(self.engine, self.config, self._conditions) as fact:
            self.known = (fact and fact.value) or Observations()

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
