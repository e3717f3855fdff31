"""Takes a plan's steps in order until one builds a session that gives the golden answers."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from graphkiln.engines.base import Engine, Placement, Session, Step
from graphkiln.engines.registry import load_engine
from graphkiln.graph.errors import (
    EngineUnavailable,
    ExecutionError,
    LoweringError,
    SignatureError,
    VerificationError,
)
from graphkiln.graph.golden import GoldenSamples
from graphkiln.graph.manifest import Verification
from graphkiln.graph.signature import Signature
from graphkiln.lowering.plan import LoweringPlan
from graphkiln.lowering.subsets import SubsetSession
from graphkiln.lowering.warmup import made_up_feeds, warm_up
from graphkiln.passes.outputs import keep_outputs
from graphkiln.proof.comparison import prove
from graphkiln.proof.policy import REPLAY, Limits
from graphkiln.repository.version import ModelVersion

_WORTH_DROPPING = 0.05
"""Share of the nodes that a part must save before it is worth holding its weights again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """A session that may answer.

    Attributes:
        session: Ready and warm.
        step: The step that built it.
        placement: What ran where, or None when the graph could not be run on made-up inputs.
        self_test: What the golden samples proved, or None for a version that has none.
        fallbacks: One line per step that failed before this one.
        warmup_s: Seconds that warming up took.
        warmup_note: Why warming up stopped early, or empty.
    """

    session: Session
    step: Step
    placement: Placement | None
    self_test: Verification | None
    fallbacks: tuple[str, ...]
    warmup_s: float
    warmup_note: str


def lower(
    version: ModelVersion,
    plan: LoweringPlan,
    *,
    warm_sizes: tuple[int, ...] = (),
    report: Callable[[str], None] = lambda _: None,
) -> Lowered:
    """Builds, proves and warms the first step that works.

    Args:
        version: The graph and what is known of it.
        plan: The steps to try.
        warm_sizes: Batch sizes to warm up.
        report: Told in one line, later and from another thread, when a part of the outputs got a graph of its own.

    Raises:
        LoweringError: No step worked; `attempts` says what each came to.
    """
    attempts: list[str] = []
    for step in plan.steps:
        try:
            return _build(version, step, warm_sizes, tuple(attempts), report)
        except LoweringError as error:
            attempts.extend(error.attempts)
        except (EngineUnavailable, ExecutionError, SignatureError, VerificationError) as error:
            attempts.append(f"{step.engine} on {step.device}: {error}")
    raise LoweringError(f"cannot serve {version.graph_path}", attempts=tuple(attempts))


def _build(
    version: ModelVersion,
    step: Step,
    warm_sizes: tuple[int, ...],
    fallbacks: tuple[str, ...],
    report: Callable[[str], None],
) -> Lowered:
    engine = load_engine(step.engine)
    support = engine.probe(step.device)
    if not support.ok:
        raise EngineUnavailable(support.reason)
    stamp = _stamp(version.graph_path)
    session = engine.build(version.graph_path, step)
    try:
        _check_signature(version, session.signature)
        placement = _read_placement(session, version.golden)
        self_test = _self_test(session, version.golden, _limits(version)) if version.golden else None
        begun = time.monotonic()
        warmup_note = warm_up(session, warm_sizes, version.golden)
        warmup_s = time.monotonic() - begun
    except BaseException:
        session.close()
        raise
    if len(session.signature.outputs) > 1:
        session = SubsetSession(session, partial(_build_part, engine, version, step, warm_sizes, stamp=stamp), report)
    return Lowered(
        session=session,
        step=step,
        placement=placement,
        self_test=self_test,
        fallbacks=fallbacks,
        warmup_s=warmup_s,
        warmup_note=warmup_note,
    )


def _build_part(
    engine: Engine,
    version: ModelVersion,
    step: Step,
    warm_sizes: tuple[int, ...],
    outputs: tuple[str, ...],
    *,
    stamp: tuple[int, int],
) -> Session | None:
    """Builds, proves and warms the graph of some outputs; None where it would be hardly smaller.

    Raises:
        LoweringError: The graph's file has another stamp than it had when the whole graph was loaded.
    """
    with tempfile.TemporaryDirectory(prefix="graphkiln-part-") as folder:
        path = Path(folder) / version.graph_path.name
        dropped = keep_outputs(version.graph_path, outputs, path)
        if _stamp(version.graph_path) != stamp:
            raise LoweringError(f"{version.graph_path} is no longer the file that was loaded", attempts=())
        if dropped < _WORTH_DROPPING:
            return None
        session = engine.build(path, replace(step, shared_folder=None))
    golden = version.golden and version.golden.only(outputs)
    try:
        if golden:
            _self_test(session, golden, _limits(version))
        warm_up(session, warm_sizes, golden)
    except BaseException:
        session.close()
        raise
    return session


def _stamp(path: Path) -> tuple[int, int]:
    facts = path.stat()
    return facts.st_size, facts.st_mtime_ns


def _check_signature(version: ModelVersion, found: Signature) -> None:
    """A manifest that speaks of other tensors than the graph has would make the server publish lies."""
    promised = version.manifest.signature if version.manifest else found
    for kind, ours, theirs in (
        ("inputs", promised.inputs, found.inputs),
        ("outputs", promised.outputs, found.outputs),
    ):
        if [(s.name, s.dtype, len(s.shape)) for s in ours] != [(s.name, s.dtype, len(s.shape)) for s in theirs]:
            raise SignatureError(
                f"the manifest's {kind} are not the graph's",
                expected=", ".join(map(str, ours)),
                got=", ".join(map(str, theirs)),
            )


def _read_placement(session: Session, golden: GoldenSamples | None) -> Placement | None:
    if golden:
        return session.placement(golden.inputs)
    try:
        return session.placement(made_up_feeds(session.signature))
    except (ExecutionError, SignatureError):
        # Without golden samples nobody knows which sizes of the varying dimensions make sense.
        return None


def _limits(version: ModelVersion) -> Limits:
    conversion = version.manifest.conversion if version.manifest else None
    return REPLAY[conversion.precision if conversion else "fp32"]


def _self_test(session: Session, golden: GoldenSamples, limits: Limits) -> Verification:
    """Replays the golden samples one by one and all together on the session that will answer."""
    samples = len(next(iter(golden.inputs.values())))
    singles = [session.run({name: array[i : i + 1] for name, array in golden.inputs.items()}) for i in range(samples)]
    alone = {name: np.concatenate([single[name] for single in singles]) for name in golden.graph_outputs}
    prove(golden.graph_outputs, alone, limits, batch_sizes=(1,))
    together = session.run(golden.inputs)
    return prove(golden.graph_outputs, together, limits, batch_sizes=(1, samples))
