"""Prove a graph against its source model, at every sampled batch size and shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphkiln_backend.engines.base import Session, SessionConfig
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ConversionError,
    ExecutionError,
    LoweringError,
    SignatureError,
    UndecidedError,
    VerificationError,
)
from graphkiln_backend.graph.golden import GoldenSamples, repeated
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.graph.task import Detection, Ranking, Reading, Task
from graphkiln_backend.passes.base import Rewritten
from graphkiln_backend.passes.edge import Arrays, Edge
from graphkiln_backend.proof.comparison import compare, prove
from graphkiln_backend.proof.policy import EXPORT, REPLAY, Limits, gradient_limits
from graphkiln_backend.proof.tasks import TaskTargets, judge, why_undecided
from graphkiln_backend.system.resources import usable_cores
from graphkiln_converters.sources.base import EXPORT_BATCH, run_in_batches, with_progress

# Both differ from `EXPORT_BATCH`, so that a fixed batch cannot pass.
_PROOF_BATCH_SIZES = (1, 3)
# For a graph whose fixed batch was made dynamic.
_FREED_BATCH_SIZES = (1, 3, 5)
GOLDEN_SAMPLES = 4
_MOST_COMPARED = 1000  # elements of a row by which golden samples are chosen


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceSamples:
    """Samples of one set of sizes, with the expected outputs of the graph after all passes.

    Attributes:
        feeds: Inputs of the saved graph, `[samples, ...]` each.
        outputs: Outputs of the source, converted to those of the saved graph.
        gradients: Names of gradient outputs.
        gradient_noise: Relative change of the source's gradients for the smallest fp32 change of the input.
        ranking: Ranking outputs, or None.
        task: The image task, or None.
        targets: True classes, `[samples]`, or the task's ground truth; None if unknown.
        whole: The arrays are one sample of a graph without a batch.
    """

    feeds: Arrays
    outputs: Arrays
    gradients: frozenset[str] = frozenset()
    gradient_noise: float = 0.0
    ranking: Ranking | None = None
    task: Task | None = None
    targets: TaskTargets | None = None
    whole: bool = False

    def at(self, edge: Edge) -> ReferenceSamples:
        """Translate feeds and outputs to those of a rewritten graph."""
        return replace(
            self,
            feeds=edge.to_graph_feeds(self.feeds),
            outputs=edge.to_graph_outputs(self.outputs),
            ranking=edge.ranking or self.ranking,
            task=edge.to_graph_task(self.task),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """Result of a proof.

    Attributes:
        verification: Worst verdict, and that of the gradients.
        errors: Worst relative L2 error of each output.
        signature: Signature of the graph.
        largest_difference: Largest difference of an element at any size.
        golden: Golden samples.
    """

    verification: tuple[Verification, ...]
    errors: dict[str, float]
    largest_difference: float
    signature: Signature
    golden: GoldenSamples


@dataclass(frozen=True, kw_only=True, slots=True)
class ProvenGraph:
    """A proven graph.

    Attributes:
        graph: The ONNX file; external weights are beside it.
        proof: The proof of this file.
        rewritten: Changes to the exported graph.
        verification: All proofs.
        notes: Remarks for the log and the manifest.
        precision: Precision of its products.
        quantizer: The quantizer, which a recipe may leave to the conversion; empty if it is not int8.
        engine: Value of `engine` for a new config.pbtxt; empty for the default.
    """

    graph: Path
    proof: Proof
    rewritten: Rewritten
    verification: tuple[Verification, ...]
    notes: tuple[str, ...] = ()
    precision: Precision = Precision.FP32
    quantizer: str = ""
    engine: str = ""


def other_batch_sizes(saved: int) -> tuple[int, ...]:
    """At least two batch sizes for a proof, different from the saved one."""
    sizes = _PROOF_BATCH_SIZES if saved == EXPORT_BATCH else _FREED_BATCH_SIZES
    return tuple(size for size in sizes if size != saved)


def prove_graph(
    graph: Path,
    samples: Sequence[ReferenceSamples],
    limits: Limits,
    noise: float | None = None,
    batch_sizes: tuple[int, ...] = _PROOF_BATCH_SIZES,
) -> Proof:
    """Prove a graph on all samples, in batches of each size.

    Args:
        graph: The graph; ONNX Runtime must run it on the CPU.
        samples: Inputs and expected outputs.
        limits: Row of the policy.
        noise: Largest difference caused by fp32, for a graph of a lower precision.
        batch_sizes: Sizes different from the saved or exported one; unused for whole samples.

    Raises:
        VerificationError: An output exceeds its limits, or the graph does not run.
        UndecidedError: The samples cannot distinguish a correct graph from a wrong one.
    """
    with OnnxRuntimeEngine().build_reference(graph) as session:
        return prove_session(session, samples, limits, noise, batch_sizes)


def prove_session(
    session: Session,
    samples: Sequence[ReferenceSamples],
    limits: Limits,
    noise: float | None = None,
    batch_sizes: tuple[int, ...] = _PROOF_BATCH_SIZES,
) -> Proof:
    """Prove an open session like `prove_graph`.

    Raises:
        VerificationError: An output exceeds its limits, or the graph does not run.
        UndecidedError: The samples cannot distinguish a correct graph from a wrong one.
    """
    empty = [_why_empty(group, limits) for group in samples]
    if empty and all(empty):  # otherwise any graph that detects nothing would pass
        raise _undecided(empty[0])
    if reason := _why_alike(samples):
        raise _undecided(reason, "--samples FILE with inputs that have different answers")
    verdicts: list[Verification] = []
    errors: dict[str, float] = {}
    largest = 0.0
    rounds = [(group, () if group.whole else batch_sizes) for group in samples]
    runs = [(group, sizes, size) for group, sizes in rounds for size in sizes or (0,)]
    for group, sizes, size in with_progress(runs, "proving the outputs, at each size"):
        outputs = _run(session, group.feeds, size)
        verdicts += _verdicts(group, outputs, limits, noise, sizes)
        aligned = judge(group.task, group.outputs, outputs, limits).outputs
        largest = max([largest, *(_difference(array, aligned[name]) for name, array in group.outputs.items())])
        for error in compare(group.outputs, aligned):
            errors[error.name] = max(errors.get(error.name, 0.0), error.relative_l2)
    # Of several verdicts on one step, the last in this order remains: the worst.
    worst = {verdict.step: verdict for verdict in sorted(verdicts, key=lambda verdict: verdict.relative_l2)}
    return Proof(
        verification=tuple(worst[step] for step in dict.fromkeys(verdict.step for verdict in verdicts)),
        errors=errors,
        largest_difference=largest,
        signature=session.signature,
        golden=_golden(session, samples[0]),
    )


# What serves: the proof above runs the saved graph as it is; a server lets the engine rewrite it first.

REPLAYED_SIZES = (1, 2, 5)
NOT_SERVED = "the graph is proven, but not as it would be served"


def prove_served(
    graph: Path,
    golden: GoldenSamples,
    precision: Precision,
    source: Limits,
    *,
    reading: Reading | None,
    largest_batch: int,
    way_out: str = "",
    engine: str = REFERENCE_ENGINE,
) -> None:
    """Replay golden samples on the session that `verify`, `explain` and a server build.

    Args:
        graph: The proven graph.
        golden: Samples of its proof.
        precision: Precision of the graph.
        source: Row of the policy for the outputs of the source model.
        reading: Interpretation of the outputs by users, or None.
        largest_batch: Largest batch that the server will form.
        way_out: Hint for the user if the outputs differ.
        engine: Engine of the session; the default is that of a server.

    Raises:
        VerificationError: The session cannot be built, or its outputs differ.
    """
    if precision is Precision.BF16:
        return  # on CPUs ONNX Runtime does not serve it, as a note of the conversion says
    config = SessionConfig(
        engine=engine,
        device=CPU,
        threads=usable_cores(),
        spin=False,
        reason="the default" if engine == REFERENCE_ENGINE else "the fastest",
        largest_batch=largest_batch,
    )
    sizes = tuple(sorted({*REPLAYED_SIZES, largest_batch}))
    try:
        with load_engine(engine).build(graph, config) as session:
            references = (golden.graph_outputs, REPLAY[precision]), (golden.source_outputs, source)
            replay_golden(session, golden, references, reading=reading, sizes=sizes)
    except (LoweringError, ExecutionError, SignatureError) as error:
        raise VerificationError(NOT_SERVED, report=str(error)) from error
    except VerificationError as error:
        raise VerificationError(
            NOT_SERVED, report=error.report, hint=way_out or error.hint, relative_l2=error.relative_l2
        ) from error


def replay_golden(
    session: Session,
    golden: GoldenSamples,
    references: Sequence[tuple[Arrays, Limits]],
    *,
    reading: Reading | None,
    sizes: Sequence[int] = REPLAYED_SIZES,
) -> list[Verification]:
    """Compute golden samples at several batch sizes, and compare the outputs with each reference.

    Args:
        session: Computes the samples, once for all references.
        golden: The samples.
        references: Expected outputs, with their row of the policy.
        reading: Interpretation of the outputs by users, or None.
        sizes: Batch sizes.

    Returns:
        The worst verdict for each reference.

    Raises:
        VerificationError: The outputs differ.
    """
    if golden.whole:
        outputs = session.run(golden.inputs)
        return [
            prove(trusted, outputs, limits, batch_sizes=(), reading=reading, samples=1)
            for trusted, limits in references
        ]
    counts = [max(size, golden.count) for size in sizes]
    computed = [
        run_in_batches(session.run, golden.batch(count), size) for count, size in zip(counts, sizes, strict=True)
    ]
    verdicts = []
    for trusted, limits in references:
        of_sizes = [
            prove(repeated(trusted, count), outputs, limits, batch_sizes=tuple(sizes), reading=reading)
            for count, outputs in zip(counts, computed, strict=True)
        ]
        verdicts.append(max(of_sizes, key=lambda verdict: verdict.relative_l2))
    return verdicts


def with_own_limit(limits: Limits, relative_l2: float | None) -> Limits:
    """A row of the policy, with the error limit of a recipe, if it has one."""
    return replace(limits, relative_l2=relative_l2) if relative_l2 else limits


def _why_empty(group: ReferenceSamples, limits: Limits) -> str:
    """Explain why samples without detections are undecided; return "" if there are detections."""
    task = group.task
    empty = isinstance(task, Detection) and not np.any(group.outputs.get(task.counts, 1))
    return why_undecided(task, group.outputs, limits) if empty else ""


def _why_alike(samples: Sequence[ReferenceSamples]) -> str:
    """Explain why samples are undecided if a graph that ignores its inputs would pass; "" if it would not."""
    first = samples[0]
    for group in samples:
        if group.task is not None:  # its task has controls
            return ""
        fixed = {}
        for name, array in group.outputs.items():
            of_first = first.outputs[name] if group.whole or len(array) == 1 else array
            of_first = of_first if group.whole else of_first[:1]
            if np.shape(of_first)[not group.whole :] != array.shape[not group.whole :]:
                return ""
            fixed[name] = np.broadcast_to(of_first, array.shape)
        if any(not error.within(EXPORT) for error in compare(group.outputs, fixed)):
            return ""
    count = sum(1 if group.whole else len(next(iter(group.outputs.values()))) for group in samples)
    return f"all {count} have the same outputs" if count > 1 and any(group.feeds for group in samples) else ""


def _undecided(reason: str, hint: str = "") -> UndecidedError:
    hint = hint or "--weights FILE or --pretrained instead of random weights; --samples DIR with images of objects"
    return UndecidedError("the samples prove nothing", report=reason, hint=hint)


def _run(session: Session, feeds: Arrays, size: int) -> dict[str, AnyArray]:
    """Run a graph in batches of a size; 0 for whole inputs. Compare the outputs with what it declares."""

    def run(batch: Arrays) -> dict[str, AnyArray]:
        found = session.run(batch)
        session.signature.check_answers(batch, found)
        return found

    try:
        return run_in_batches(run, feeds, size) if size else run(feeds)
    except (SignatureError, ExecutionError, ConversionError) as error:
        dims = {name: [size, *array.shape[1:]] if size else list(array.shape) for name, array in feeds.items()}
        shapes = ", ".join(f"{name} {shape}" for name, shape in dims.items())
        raise VerificationError(
            "the outputs changed", report=f"the graph does not run with {shapes}: {error}"
        ) from error


def _verdicts(
    group: ReferenceSamples, outputs: Arrays, limits: Limits, noise: float | None, batch_sizes: tuple[int, ...]
) -> list[Verification]:
    """Verdicts on the outputs, and on the gradients, which have their own row of the policy."""
    expected, expected_gradients = _split(group.outputs, group.gradients)
    found, found_gradients = _split(outputs, group.gradients)
    try:
        verdicts = [
            prove(
                expected,
                found,
                limits,
                batch_sizes=batch_sizes,
                noise=noise,
                targets=group.targets,
                reading=group.ranking or group.task,
                samples=1 if group.whole else None,
            )
        ]
        if group.gradients:
            row = gradient_limits(limits, group.gradient_noise)
            verdicts.append(prove(expected_gradients, found_gradients, row, batch_sizes=batch_sizes))
    except VerificationError as error:
        # A failure on undecided samples does not prove that the graph is wrong.
        if reason := why_undecided(group.task, group.outputs, limits):
            raise _undecided(reason) from error
        raise
    return verdicts


def _split(outputs: Arrays, gradients: frozenset[str]) -> tuple[Arrays, Arrays]:
    """Split into plain outputs and gradients."""
    return (
        {name: array for name, array in outputs.items() if name not in gradients},
        {name: array for name, array in outputs.items() if name in gradients},
    )


def _golden(session: Session, group: ReferenceSamples) -> GoldenSamples:
    if group.whole:
        outputs = session.run(group.feeds)
        return GoldenSamples(inputs=group.feeds, source_outputs=group.outputs, graph_outputs=outputs, whole=True)
    rows = _different_rows(group.outputs)
    feeds = {name: array[rows] for name, array in group.feeds.items()}
    return GoldenSamples(
        inputs=feeds,
        source_outputs={name: array[rows] for name, array in group.outputs.items()},
        graph_outputs=session.run(feeds),
    )


def _different_rows(outputs: Arrays) -> list[int]:
    """Choose the first rows, or if some of them have the same outputs, rows whose outputs differ most."""
    parts = []
    for array in outputs.values():
        flat = array.reshape(len(array), -1)
        flat = flat[:, :: 1 + flat.shape[1] // _MOST_COMPARED]
        if flat.dtype.kind not in "fiub":
            flat = np.unique(flat, return_inverse=True)[1].reshape(flat.shape)
        exact = np.nan_to_num(flat.astype(np.float64))
        parts.append(exact / (np.abs(exact).max(initial=0.0) or 1.0))
    table = np.concatenate(parts, axis=1)
    if len(np.unique(table[:GOLDEN_SAMPLES], axis=0)) == GOLDEN_SAMPLES:
        return [*range(GOLDEN_SAMPLES)]
    rows, distance = [0], np.full(len(table), np.inf)
    while len(rows) < min(GOLDEN_SAMPLES, len(table)):
        distance = np.minimum(distance, np.square(table - table[rows[-1]]).sum(axis=1))
        distance[rows] = -1.0
        rows.append(int(distance.argmax()))
    return sorted(rows)


def _difference(reference: AnyArray, output: AnyArray) -> float:
    """Largest difference of floating-point elements that are finite in both."""
    if reference.dtype.kind != "f":
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):  # infinite values are compared elsewhere
        difference = np.abs(output.astype(np.float64) - reference.astype(np.float64))
    return float(np.max(difference, initial=0.0, where=np.isfinite(difference)))
