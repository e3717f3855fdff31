"""Builds one session and proves it: its tensors, what really ran, the golden outputs, every batch size."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from graphkiln_backend.engines.base import Engine, KernelType, Placement, Session, SessionConfig
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine, open_reference
from graphkiln_backend.graph.decoding import decode, encode
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import (
    CacheError,
    EngineUnavailable,
    GraphkilnError,
    LoweringError,
    ManifestError,
    VerificationError,
)
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import (
    Requirements,
    check_placement,
    check_signature,
    limits_of,
    promised_signature,
    read_placement,
    replay,
    replay_mixed,
)
from graphkiln_backend.lowering.artifacts import Artifacts, Phases
from graphkiln_backend.lowering.measurement import Basis
from graphkiln_backend.lowering.output_subsets import SubsetBuilder, SubsetSession
from graphkiln_backend.lowering.replaying import Replay
from graphkiln_backend.lowering.warmup import (
    SyntheticInputs,
    WarmUp,
    different_rows,
    repeat_warm_up,
    synthetic_inputs,
    warm_up,
)
from graphkiln_backend.proof.comparison import compare
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.repository.onnx_file import read_mixing
from graphkiln_backend.repository.training_mode import EVALUATION_MODE, draws_numbers, find_training

# One request is really made before a session serves, also where there are no golden samples.
#
# What a graph takes nobody knows then, and an operator may refuse what was made up: an index that is out of range, a
# size that does not fit. So the saved graph is asked, too, by ONNX Runtime with all optimizations off: what it
# computes, the session must compute; where it fails as well, the request is at fault and not the session. A session
# of another engine, or of another precision, must compute the same besides, as far as the saved graph itself computes
# the same twice.

_FEWEST_ROWS = 3
# Of dimensions that vary, beside the size that a request was made up with: along a dimension of 1 nothing mixes.
_SIZE = 8

OpenReference = Callable[[Path], Session]
Feeds = Mapping[str, AnyArray]
Outputs = Mapping[str, AnyArray]


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of it.

    Attributes:
        synthetic: Inputs that the session computes; None where none are known.
        note: Why there is none, or what could not be compared; empty where there is nothing to say.
    """

    synthetic: SyntheticInputs | None
    note: str = ""


def try_as_saved(session: Session, graph_path: Path, open_reference: OpenReference) -> Trial:
    """Asks a session that runs the graph as it was saved.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads it for the comparison.

    Raises:
        LoweringError: It refuses what the saved graph computes, or whatever it is handed.
    """
    failures: list[tuple[SyntheticInputs, GraphkilnError]] = []
    for inputs in synthetic_inputs(session.signature):
        try:
            session.run(inputs.feeds(session.signature))
        except GraphkilnError as error:
            failures.append((inputs, error))
        else:
            return Trial(inputs)
    with _opened(open_reference, graph_path) as reference:
        for inputs, failure in failures:
            if _computes(reference, inputs):
                raise LoweringError("the session fails where the saved graph does not", attempts=(str(failure),))
    _check_values_matter(session, [str(failure) for _, failure in failures])
    return Trial(None, f"no request that was made up runs, the first because: {failures[0][1]}")


def try_beside(session: Session, graph_path: Path, open_reference: OpenReference, limits: Limits) -> Trial:
    """Asks a session that another engine, or the passes, made of the saved graph.

    It is never handed what the saved graph refuses: OpenVINO (2026.4) divides by a zero that ONNX Runtime reports.

    Args:
        session: The session.
        graph_path: The saved graph.
        open_reference: Loads it for the comparison.
        limits: How far the outputs may be apart.

    Raises:
        LoweringError: It refuses what the saved graph computes.
        VerificationError: It computes something else, or nothing could be compared.
    """
    with _opened(open_reference, graph_path) as reference:
        if reference is None:
            raise _unproven("it has no golden samples, and ONNX Runtime does not load it for a comparison")
        taken = [inputs for inputs in synthetic_inputs(reference.signature) if _computes(reference, inputs)]
        for inputs in taken:
            _compare(session, reference, inputs, limits)
    if not taken:
        raise _unproven("it has no golden samples, and refuses every request that was made up")
    return Trial(taken[0])


def check_repeats(session: Session, synthetic: SyntheticInputs, limits: Limits) -> None:
    """Makes the same request twice.

    ONNX Runtime (1.31) writes the new statistics of a BatchNormalization in training mode over the saved ones.

    Raises:
        LoweringError: The responses differ: what was requested before would be part of every response.
    """
    feeds = synthetic.feeds(session.signature)
    wrong = [str(error) for error in compare(session.run(feeds), session.run(feeds)) if not error.within(limits)]
    if wrong:
        raise LoweringError(
            "the same request gets another response the second time",
            attempts=(wrong[0],),
            hint="a BatchNormalization in training mode does that: export the model in evaluation mode (model.eval())",
        )


def find_mixed_rows(session: Session, synthetic: SyntheticInputs | None, limits: Limits) -> str:
    """Why the rows of several requests must not be computed together; empty where they may.

    Args:
        session: The session.
        synthetic: Inputs that it computes; None where none are known.
        limits: How far a row of a batch may be from the same row alone.
    """
    signature = session.signature
    if not all(spec.batchable for spec in signature.inputs):
        return ""
    if synthetic is None:
        return "no request is known that the graph computes, so nobody knows whether its rows depend on each other"
    sizes = dict.fromkeys((synthetic.size, _SIZE)) if _has_sizes(signature) else (synthetic.size,)
    for size in sizes:
        tried = ((row, _outputs(session, row)) for row in different_rows(signature, size))
        rows, alone = _transposed([(row, outputs) for row, outputs in tried if outputs is not None])
        if len(rows) < _FEWEST_ROWS and size == synthetic.size:
            rows, alone = [synthetic.feeds(signature, seed=seed) for seed in range(_FEWEST_ROWS)], []
        if len(rows) >= _FEWEST_ROWS and (reason := _compare_rows(session, rows, alone, limits)):
            return reason
    return ""


def _transposed(pairs: Sequence[tuple[Feeds, Outputs]]) -> tuple[list[Feeds], list[Outputs]]:
    return [row for row, _ in pairs], [outputs for _, outputs in pairs]


def _compare_rows(session: Session, rows: Sequence[Feeds], alone: Sequence[Outputs], limits: Limits) -> str:
    """Computes rows together, and alone where that is not done yet.

    Each is compared by itself, since a large one would hide the others.
    """
    feeds = {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}
    try:
        alone = alone or [session.run(row) for row in rows]
        together = session.run(feeds)
    except GraphkilnError as error:
        return f"{len(rows)} rows at once fail: {error}"
    for name, array in together.items():
        if array.shape[:1] != (len(rows),) or any(single[name].shape[:1] != (1,) for single in alone):
            return f"output '{name}' has the shape {list(array.shape)} for {len(rows)} rows"
    for index, single in enumerate(alone):
        found = {name: array[index : index + 1] for name, array in together.items()}
        if differing := [str(error) for error in compare(single, found) if not error.within(limits)]:
            return f"a row depends on the others: {differing[0]}"
    return ""


def _has_sizes(signature: Signature) -> bool:
    return any(isinstance(dim, str) for spec in signature.inputs for dim in spec.shape[1:])


def _outputs(session: Session, feeds: Feeds) -> Outputs | None:
    """What it computes; None where it refuses."""
    try:
        return session.run(feeds)
    except GraphkilnError:
        return None


@contextmanager
def _opened(open_reference: OpenReference, graph_path: Path) -> Iterator[Session | None]:
    """The saved graph as a session, or None where it cannot be loaded."""
    try:
        reference = open_reference(graph_path)
    except GraphkilnError:
        yield None
        return
    with reference:
        yield reference


def _computes(reference: Session | None, inputs: SyntheticInputs) -> bool:
    if reference is None:
        return False
    try:
        reference.run(inputs.feeds(reference.signature))
    except GraphkilnError:
        return False
    return True


def _compare(session: Session, reference: Session, inputs: SyntheticInputs, limits: Limits) -> None:
    feeds = inputs.feeds(reference.signature)
    expected = reference.run(feeds)
    try:
        outputs = session.run(feeds)
    except GraphkilnError as error:
        raise LoweringError("the session fails where the saved graph does not", attempts=(str(error),)) from error
    wrong = [str(error) for error in compare(expected, outputs) if not error.within(limits)]
    if wrong and _same(expected, reference.run(feeds)):
        raise VerificationError(
            "the outputs are not those of the saved graph",
            report=f"{limits.name}, for a request that was made up: {'; '.join(wrong)}",
            hint="choose another engine or precision, or convert the model with samples that make sense to it",
        )


def _check_values_matter(session: Session, failures: Sequence[str]) -> None:
    """Refuses a graph that the runtime can never compute: sizes are fixed, and the values change nothing.

    Text is another matter: of the few that are tried, none may be a number or a date.

    Raises:
        LoweringError: Every request fails, and all for the same reason.
    """
    inputs = session.signature.inputs
    fixed = all(isinstance(dim, int) for spec in inputs for dim in spec.shape)
    if fixed and len(set(failures)) == 1 and not any(spec.dtype is DType.BYTES for spec in inputs):
        raise LoweringError("every request fails, whatever its values are", attempts=(failures[0],))


def _unproven(report: str) -> VerificationError:
    return VerificationError(
        "nothing proves that the outputs are those of the saved graph",
        report=report,
        hint="convert it with samples that make sense to it (graphkiln convert FILE.onnx --samples DIR), leave engine "
        "and precision out, or serve it unproven (self_test: off)",
    )


def _same(first: Mapping[str, AnyArray], second: Mapping[str, AnyArray]) -> bool:
    return all(map(partial(_same_array, first, second), first))


def _same_array(first: Mapping[str, AnyArray], second: Mapping[str, AnyArray], name: str) -> bool:
    return first[name].shape == second[name].shape and first[name].tobytes() == second[name].tobytes()


# What was found out about a session when it was proven for the first time on this machine, for later starts.
#
# The golden samples are replayed, or a request is made, at every start. What follows from the graph, the engine's
# release and the processor alone is found once: which kernels run, which takes a second session to see; whether rows
# may share a batch; which batch sizes pay for being run ahead. An entry is named by all that it depends on.

_FILE = "observations.json"
_NO_PRECISION: dict[str, KernelType] = {"fp64": "fp64", "integer": "integer", "unknown": "unknown"}


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadPlacement:
    """A `Placement`, as the file holds it."""

    nodes: dict[str, int]
    precision: KernelType
    products: dict[str, int] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()

    @classmethod
    def of(cls, placement: Placement) -> ReadPlacement:
        """To keep it."""
        products = {str(name): count for name, count in placement.products.items()}
        return cls(
            nodes=dict(placement.nodes),
            precision=placement.precision,
            products=products,
            elsewhere=placement.elsewhere,
        )

    @property
    def placement(self) -> Placement:
        """As it was read back from the engine."""
        return Placement(
            nodes=self.nodes,
            precision=self.precision,
            products={_kernel_type(name): count for name, count in self.products.items()},
            elsewhere=self.elsewhere,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Observations:
    """What holds for every session that is built alike; `observations.json` keeps it under these names.

    Attributes:
        complete: Whether anything was found out yet.
        placed: What ran where; None where it could not be read.
        mixed: Why the rows of several requests must not be computed together; empty where they may.
        repeats: Whether the same request gave the same bits again and again.
        warmed: The batch sizes that paid for being run before the first request, in the order of the runs; None where
            that failed.
    """

    complete: bool = False
    placed: ReadPlacement | None = None
    mixed: str = ""
    repeats: bool = False
    warmed: tuple[int, ...] | None = None


def read_observations(
    artifacts: Artifacts, engine: Engine, config: SessionConfig, conditions: Mapping[str, str]
) -> Observations:
    """What is known of sessions that are built alike; nothing where the cache does not last.

    Args:
        artifacts: Of the version.
        engine: Builds them.
        config: How.
        conditions: What else it depends on.
    """
    with artifacts.reserve_observations(engine, config, conditions) as reservation:
        path = reservation.path if reservation else None
        if path is None:
            return Observations()
        try:
            return decode(Observations, json.loads((path / _FILE).read_bytes()))
        except (OSError, ValueError, ManifestError) as error:
            _log.warning("what was found out about %s cannot be read: %s", config, error)
            return Observations()


def keep_observations(
    artifacts: Artifacts,
    engine: Engine,
    config: SessionConfig,
    conditions: Mapping[str, str],
    observations: Observations,
) -> None:
    """Keeps what was found out for later starts; where it cannot be written, that is logged, and is no fault.

    Args:
        artifacts: Of the version.
        engine: As for `read_observations`.
        config: The same.
        conditions: The same.
        observations: What to keep.
    """
    with artifacts.reserve_observations(engine, config, conditions) as reservation:
        if reservation is None or reservation.path:  # another instance was faster
            return
        try:
            with reservation.write() as folder:
                (folder / _FILE).write_text(json.dumps(encode(observations)))
        except CacheError as error:
            _log.warning("what was found out about %s is not remembered: %s", config, error)


def _kernel_type(name: str) -> KernelType:
    return _NO_PRECISION.get(name) or Precision(name)


_log = logging.getLogger("graphkiln.lowering")

_STREAMS = "leave `streams` out, or let each request be computed whole: max_batch_size: 0"
_MICRO_BATCHES = "write micro_batches=1: the stages then take turns"
WARM_UP = "warm-up"  # the phase


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenSession:
    """A session that may serve.

    Attributes:
        session: Ready and warm; owned by whoever holds this.
        config: What it was built by.
        placement: What ran where, or None when the graph could not be run on synthetic inputs.
        self_test: What the golden samples proved, or None for a version that has none, or with `self_test: off`.
        fallbacks: One line per configuration that failed before this one.
        slower: One line per candidate that works and is not the fastest.
        basis: What the choice between candidates was based on; None where there was none.
        phases: Seconds of each phase of building and proving it.
        notes: What a person should know: why warming up stopped early, what is computed otherwise than saved.
        replay: Proves it again while it serves; None with `self_test: off`, and where nothing can be.
        synthetic: Inputs that it computes; None where golden samples are there, or none are known.
        separate: Whether requests must be computed one by one, because the graph mixes the rows of a batch.
    """

    session: Session
    config: SessionConfig
    placement: Placement | None
    self_test: Verification | None
    fallbacks: tuple[str, ...] = ()
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
    """Builds, proves and warms a session.

    Args:
        artifacts: Of the version.
        config: How to run it.
        requirements: What it must do.

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
    session = artifacts.build_session(engine, config, phases)
    try:
        proven = _Proof(session, engine, artifacts, config, requirements, phases).run()
        if len(session.signature.outputs) == 1 or config.splits:
            return proven
        graph = artifacts.prepare_graph(config)
        builder = SubsetBuilder(
            engine=engine,
            graph=graph,
            config=config,
            artifacts=artifacts,
            requirements=requirements,
            synthetic=proven.synthetic,
        )
        subsets = SubsetSession(session, builder.build)
        return replace(proven, session=subsets, replay=proven.replay and replace(proven.replay, session=subsets))
    except BaseException:
        session.close()
        raise


@dataclass(slots=True)
class _Proof:
    """Proves and warms one session; what was found out at an earlier start is not looked for again."""

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
        with measure("signature"):
            check_signature(version, self.session.signature)
            self.known = read_observations(self.artifacts, self.engine, self.config, self._conditions)
        limits = limits_of(self.artifacts.saved, self.config)
        with measure("trial"):
            trial = Trial(None) if version.golden else self._try_out(limits)
            self._check_repeats(trial.synthetic, limits)
        with measure("placement"):
            placement = self._place(trial.synthetic)
        notes = check_placement(self.config, placement, self.artifacts.saved)
        with measure("golden replay"):
            self_test = self._replay(limits)
        if version.golden and not self_test:
            notes = (*notes, "self_test: off: the golden samples were not replayed")
        with measure(WARM_UP):
            warmed = self._warm_up(version.golden or trial.synthetic, replayed=self_test is not None)
        with measure("replays"):
            again = self._prepare_replays(trial.synthetic, limits)
        with measure("rows"):
            mixed = self._find_mixed_rows(trial.synthetic, limits)
        self._keep(placement, mixed, warmed, repeats=again is not None)
        separate = mixed and f"requests are computed one by one: {mixed}"
        told = (*map(str, self.artifacts.replaced), *notes, trial.note, warmed.note, separate)
        return ProvenSession(
            session=self.session,
            config=self.config,
            placement=placement,
            self_test=self_test,
            phases=self.phases.seconds,
            notes=tuple(filter(None, told)),
            replay=again,
            synthetic=trial.synthetic,
            separate=bool(mixed),
        )

    @property
    def _conditions(self) -> dict[str, str]:
        """What the observations depend on beside the session."""
        requirements = self.requirements
        golden = self.artifacts.version.golden is not None
        return {"batches": f"{requirements.batch_sizes}", "proof": f"{requirements.self_test}, golden: {golden}"}

    def _keep(self, placement: Placement | None, mixed: str, warmed: WarmUp, *, repeats: bool) -> None:
        if self.known.complete:
            return
        placed = ReadPlacement.of(placement) if placement else None
        observations = Observations(
            complete=True, placed=placed, mixed=mixed, repeats=repeats, warmed=None if warmed.note else warmed.sizes
        )
        with self.phases.measure("observations"):
            keep_observations(self.artifacts, self.engine, self.config, self._conditions, observations)

    def _replay(self, limits: Limits) -> Verification | None:
        version, requirements = self.artifacts.version, self.requirements
        if not (version.golden and requirements.self_test):
            return None
        found = replay(self.session, version.golden, limits, requirements.largest_batch, version.reading)
        if self.config.splits:
            replay_mixed(self.session, version.golden, limits, requirements.largest_batch, version.reading)
        return found

    def _try_out(self, limits: Limits) -> Trial:
        """Makes a request of a session whose version has no golden samples."""
        artifacts, config = self.artifacts, self.config
        graph = artifacts.prepare_graph(replace(config, precision=None))
        open_saved = partial(open_reference, op_libraries=config.op_libraries)
        plain = config.engine == REFERENCE_ENGINE and not config.splits
        as_saved = plain and config.precision in (None, artifacts.saved)
        if self.requirements.self_test and not as_saved:
            return try_beside(self.session, graph, open_saved, limits)
        return try_as_saved(self.session, graph, open_saved)

    def _place(self, synthetic: SyntheticInputs | None) -> Placement | None:
        if self.known.placed:
            return self.known.placed.placement
        return read_placement(self.session, self.artifacts.version.golden, synthetic)

    def _warm_up(self, samples: GoldenSamples | SyntheticInputs | None, *, replayed: bool) -> WarmUp:
        if samples is None:
            return WarmUp()
        if self.known.warmed is not None:
            return repeat_warm_up(self.session, self.known.warmed, samples)
        sizes, on_gpu = self.requirements.batch_sizes, self.config.device.is_gpu
        return warm_up(self.session, sizes, samples, everything=on_gpu, already=replayed)

    def _prepare_replays(self, synthetic: SyntheticInputs | None, limits: Limits) -> Replay | None:
        """What proves the session again while it serves; None where nothing does."""
        version = self.artifacts.version
        if not self.requirements.self_test:
            return None
        if version.golden:
            return Replay.of_golden(
                self.session, version.golden, limits, version.reading, together=self._replayed_together
            )
        if synthetic is None or (self.known.complete and not self.known.repeats):
            return None
        return Replay.recorded(
            self.session,
            limits,
            synthetic.feeds(self.session.signature, self._replayed_together),
            runs=2 if self.known.complete else 3,
        )

    @property
    def _replayed_together(self) -> int:
        """Rows of the batch that is replayed, too, so that all of its parts are under way together; 1 for none."""
        numbers, golden = self.config.parallel, self.artifacts.version.golden
        splits = numbers is not None and numbers.pipeline > 1 and numbers.micro_batches > 1
        return self.requirements.largest_batch if splits and not (golden and golden.whole) else 1

    def _check_repeats(self, synthetic: SyntheticInputs | None, limits: Limits) -> None:
        if self.known.complete or synthetic is None or draws_numbers(self.artifacts.version.graph_path):
            return
        check_repeats(self.session, synthetic, limits)

    def _find_mixed_rows(self, synthetic: SyntheticInputs | None, limits: Limits) -> str:
        """Why the rows of several requests are computed one by one; empty where they may share a batch.

        Raises:
            LoweringError: Parts of a batch would be computed side by side, and its rows depend on each other.
        """
        version, config = self.artifacts.version, self.config
        if version.golden:
            return ""
        if self.known.complete:
            return self.known.mixed
        training = _training(version.graph_path)
        if self.requirements.largest_batch < 2:
            return training
        counted = [spec.name for spec in promised_signature(version).outputs if spec.varies != spec.batchable]
        reason = f"output '{counted[0]}' is as long as its values say" if counted else ""
        reason = training or read_mixing(version.graph_path) or reason
        reason = reason or find_mixed_rows(self.session, synthetic, limits)
        if not reason and _cuts_batches(config):  # streams cut every batch up, rows that depend on each other, too
            with open_reference(
                self.artifacts.prepare_graph(replace(config, precision=None)), config.op_libraries
            ) as reference:
                reason = find_mixed_rows(reference, synthetic, limits)
        if reason and _cuts_batches(config):
            raise LoweringError(
                f"{config} cannot compute parts of a batch side by side",
                attempts=(reason,),
                hint=_STREAMS if config.streams > 1 else _MICRO_BATCHES,
            )
        return reason


def _training(graph_path: Path) -> str:
    found = find_training(graph_path)
    return found and f"{found} in training mode, where a row depends on the others or on chance; {EVALUATION_MODE}"


def _cuts_batches(config: SessionConfig) -> bool:
    """Whether parts of a batch are computed on their own."""
    return config.streams > 1 or (config.parallel is not None and config.parallel.micro_batches > 1)
