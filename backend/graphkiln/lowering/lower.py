"""Takes a plan's steps in order until one builds a session that gives the golden answers."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from graphkiln.engines.base import Placement, Session, Step
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
from graphkiln.lowering.warmup import made_up_feeds, warm_up
from graphkiln.proof.comparison import prove
from graphkiln.proof.policy import OTHER_ENGINE
from graphkiln.repository.version import ModelVersion


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


def lower(version: ModelVersion, plan: LoweringPlan, *, warm_sizes: tuple[int, ...] = ()) -> Lowered:
    """Builds, proves and warms the first step that works.

    Args:
        version: The graph and what is known of it.
        plan: The steps to try.
        warm_sizes: Batch sizes to warm up.

    Raises:
        LoweringError: No step worked; `attempts` says what each came to.
    """
    attempts: list[str] = []
    for step in plan.steps:
        try:
            return _build(version, step, warm_sizes, tuple(attempts))
        except LoweringError as error:
            attempts.extend(error.attempts)
        except (EngineUnavailable, ExecutionError, SignatureError, VerificationError) as error:
            attempts.append(f"{step.engine} on {step.device}: {error}")
    raise LoweringError(f"cannot serve {version.graph_path}", attempts=tuple(attempts))


def _build(version: ModelVersion, step: Step, warm_sizes: tuple[int, ...], fallbacks: tuple[str, ...]) -> Lowered:
    engine = load_engine(step.engine)
    support = engine.probe(step.device)
    if not support.ok:
        raise EngineUnavailable(support.reason)
    session = engine.build(version.graph_path, step)
    try:
        _check_signature(version, session.signature)
        placement = _read_placement(session, version.golden)
        self_test = _self_test(session, version.golden) if version.golden else None
        begun = time.monotonic()
        warmup_note = warm_up(session, warm_sizes, version.golden)
        warmup_s = time.monotonic() - begun
    except BaseException:
        session.close()
        raise
    return Lowered(
        session=session,
        step=step,
        placement=placement,
        self_test=self_test,
        fallbacks=fallbacks,
        warmup_s=warmup_s,
        warmup_note=warmup_note,
    )


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


def _self_test(session: Session, golden: GoldenSamples) -> Verification:
    """Replays the golden samples one by one and all together on the session that will answer."""
    samples = len(next(iter(golden.inputs.values())))
    singles = [session.run({name: array[i : i + 1] for name, array in golden.inputs.items()}) for i in range(samples)]
    alone = {name: np.concatenate([single[name] for single in singles]) for name in golden.graph_outputs}
    prove(golden.graph_outputs, alone, OTHER_ENGINE, batch_sizes=(1,))
    together = session.run(golden.inputs)
    return prove(golden.graph_outputs, together, OTHER_ENGINE, batch_sizes=(1, samples))
