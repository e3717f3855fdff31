"""Takes a plan's steps in order until one builds a session that gives the golden answers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from graphkiln_backend.engines.base import Placement, Session, SessionConfig
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.errors import (
    CacheError,
    EngineUnavailable,
    ExecutionError,
    GraphkilnError,
    LoweringError,
    SignatureError,
)
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.lowering.acceptance import check_placement, check_signature, limits_of, read_placement, replay
from graphkiln_backend.lowering.artifacts import Artifacts, Measured
from graphkiln_backend.lowering.plan import LoweringPlan, best
from graphkiln_backend.lowering.subsets import SubsetSession, build_part
from graphkiln_backend.lowering.warmup import repeated, synthetic_feeds, warm_up
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.repository.version import ModelVersion

_TIMED_RUNS = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Lowered:
    """A session that may answer.

    Attributes:
        session: Ready and warm.
        step: The step that built it.
        placement: What ran where, or None when the graph could not be run on made-up inputs.
        self_test: What the golden samples proved, or None for a version that has none, or with `self_test: off`.
        fallbacks: One line per step that failed before this one.
        slower: One line per candidate that works and is not the fastest.
        warmup_s: Seconds that warming up took.
        notes: What a person should know: why warming up stopped early, what is computed otherwise than saved.
    """

    session: Session
    step: SessionConfig
    placement: Placement | None
    self_test: Verification | None
    fallbacks: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()
    warmup_s: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirements:
    """What is asked of every session, whichever step builds it.

    Attributes:
        warm_sizes: Batch sizes to warm up.
        self_test: Whether the golden samples are replayed.
        artifacts: Where lowered graphs and compiled artifacts come from.
    """

    artifacts: Artifacts
    warm_sizes: tuple[int, ...] = (1,)
    self_test: bool = True


def lower(version: ModelVersion, plan: LoweringPlan, wanted: Requirements) -> Lowered:
    """Builds, proves and warms the fastest candidate that works, or else the first fallback that does.

    Args:
        version: The graph and what is known of it.
        plan: The steps to try.
        wanted: What is asked of the session.

    Raises:
        LoweringError: No step worked; `attempts` says what each came to.
    """
    attempts: list[str] = []
    build = partial(_try, version, wanted, attempts)
    candidates = plan.candidates
    built = build(candidates[0]) if len(candidates) == 1 else _fastest(version, candidates, wanted, build)
    for step in () if built else plan.fallback:
        built = built or build(step)
    if built is None:
        raise LoweringError(f"cannot serve {version.graph_path}", attempts=tuple(attempts))
    return replace(built, fallbacks=tuple(attempts))


def _try(version: ModelVersion, wanted: Requirements, attempts: list[str], step: SessionConfig) -> Lowered | None:
    """A session, or None and one line more in `attempts`."""
    try:
        return _build(version, step, wanted)
    except GraphkilnError as error:
        attempts.append(f"{step}: {error}")
        return None


def _fastest(
    version: ModelVersion,
    steps: Sequence[SessionConfig],
    wanted: Requirements,
    build: Callable[[SessionConfig], Lowered | None],
) -> Lowered | None:
    """The fastest candidate on the largest batch.

    What was measured is kept with the artifacts: all instances of a model choose alike, and later starts build only the
    chosen one.
    """
    built: dict[str, Lowered] = {}
    compared: list[Measured] = []
    size = max(wanted.warm_sizes)

    def measure() -> Measured:
        built.update({str(step): lowered for step in steps if (lowered := build(step))})
        compared.extend(_compare(built, version.golden, size))
        if len(built) < len(steps) or not (compared and compared[0].rates):
            raise LoweringError("not every candidate was measured: nothing to remember", attempts=())
        return compared[0]

    try:
        measured = wanted.artifacts.measured(steps, _asked_of_candidates(version, wanted), measure)
    except (LoweringError, CacheError):  # what was compared holds for this start
        if not compared:
            return None  # each candidate has said why
        measured = compared[0]
    for name, each in built.items():
        if name != measured.chosen:
            each.session.close()
    # A choice that no longer works gives way to the others.
    order = sorted(steps, key=lambda step: str(step) != measured.chosen)
    chosen = built.get(measured.chosen) or next((lowered for step in order if (lowered := build(step))), None)
    return chosen and _with_reason(chosen, measured, size)


def _asked_of_candidates(version: ModelVersion, wanted: Requirements) -> dict[str, str]:
    golden = version.manifest.golden.sha256 if version.manifest and version.manifest.golden else "none"
    return {"batch": str(max(wanted.warm_sizes)), "self-test": str(wanted.self_test), "golden samples": golden}


def _compare(built: Mapping[str, Lowered], golden: GoldenSamples | None, size: int) -> list[Measured]:
    """One comparison of sessions by name, or none where there are none.

    A graph that does not run on made-up inputs cannot be timed: the first session is as good as any.
    """
    if not built:
        return []
    try:
        times = {name: _time_s(lowered.session, golden, size) for name, lowered in built.items()}
    except (ExecutionError, SignatureError):
        return [Measured(chosen=next(iter(built)), rates={})]
    chosen = list(times)[best(list(times.values()))]
    return [Measured(chosen=chosen, rates={name: round(size / seconds, 1) for name, seconds in times.items()})]


def _with_reason(chosen: Lowered, measured: Measured, size: int) -> Lowered:
    rate = measured.rates.get(str(chosen.step))
    if rate is None:
        return chosen
    reason = f"{chosen.step.reason}; the fastest here, {rate}/s at batch {size}"
    slower = [
        f"{name}: not clearly faster, {other}/s at batch {size} beside {rate}/s"
        for name, other in measured.rates.items()
        if name != str(chosen.step)
    ]
    return replace(chosen, step=replace(chosen.step, reason=reason), slower=tuple(slower))


def _time_s(session: Session, golden: GoldenSamples | None, size: int) -> float:
    """The fastest of some runs, in seconds."""
    feeds = repeated(golden.inputs, size) if golden else synthetic_feeds(session.signature, size)
    times = []
    for _ in range(_TIMED_RUNS):
        begun = time.perf_counter()
        session.run(feeds)
        times.append(time.perf_counter() - begun)
    return min(times)


def _build(version: ModelVersion, step: SessionConfig, wanted: Requirements) -> Lowered:
    engine = load_engine(step.engine)
    support = engine.probe(step.device)
    if not support.ok:
        raise EngineUnavailable(support.reason)
    artifacts = wanted.artifacts
    session = artifacts.load(engine, step)
    limits = limits_of(artifacts.saved, step)
    golden = version.golden if wanted.self_test else None
    try:
        check_signature(version, session.signature)
        placement = read_placement(session, version.golden)
        notes = check_placement(step, placement, artifacts.saved)
        self_test = replay(session, golden, limits, max(wanted.warm_sizes), version.ranking) if golden else None
        begun = time.monotonic()
        warmup_note = warm_up(session, wanted.warm_sizes, version.golden, already=self_test is not None)
        warmup_s = time.monotonic() - begun
    except BaseException:
        session.close()
        raise
    if version.golden and not wanted.self_test:
        notes = (*notes, "self_test: off: the golden samples were not replayed")
    if len(session.signature.outputs) > 1:
        build = partial(
            build_part,
            engine=engine,
            graph=artifacts.graph(step),
            step=step,
            prove=partial(_prove_part, version=version, wanted=wanted, limits=limits),
            check_unchanged=artifacts.check_unchanged,
        )
        session = SubsetSession(session, build)
    return Lowered(
        session=session,
        step=step,
        placement=placement,
        self_test=self_test,
        warmup_s=warmup_s,
        notes=tuple(filter(None, (*notes, warmup_note))),
    )


def _prove_part(
    session: Session, outputs: tuple[str, ...], *, version: ModelVersion, wanted: Requirements, limits: Limits
) -> None:
    """Proves and warms the session of a part of the outputs."""
    golden = version.golden and version.golden.only(outputs)
    if golden and wanted.self_test:
        replay(session, golden, limits, max(wanted.warm_sizes), version.ranking)
    warm_up(session, wanted.warm_sizes, golden)
