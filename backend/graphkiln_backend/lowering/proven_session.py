"""Builds one session and proves it: its tensors, what really ran, the golden outputs, every batch size."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from graphkiln_backend.engines.base import Placement, Session, SessionConfig
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine, open_reference
from graphkiln_backend.graph.errors import EngineUnavailable, LoweringError
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.lowering.acceptance import (
    Requirements,
    check_placement,
    check_signature,
    limits_of,
    promised_signature,
    read_placement,
    replay,
)
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.made_up import MadeUp
from graphkiln_backend.lowering.output_subsets import SubsetBuilder, SubsetSession
from graphkiln_backend.lowering.replaying import Replay
from graphkiln_backend.lowering.trial import Trial, check_repeats, find_mixed_rows, try_as_saved, try_beside
from graphkiln_backend.lowering.warmup import warm_up
from graphkiln_backend.proof.policy import Limits
from graphkiln_backend.repository.onnx_file import draws_numbers, read_mixing

_log = logging.getLogger("graphkiln.lowering")

_STREAMS = "leave `streams` out, or let each request be computed whole: max_batch_size: 0"


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
        warmup_s: Seconds that warming up took.
        notes: What a person should know: why warming up stopped early, what is computed otherwise than saved.
        replay: Proves it again while it serves; None with `self_test: off`, and where nothing can be.
        made_up: How to make up a request that it computes; None where golden samples are there, or no way is known.
        separate: Whether requests must be computed one by one, because the graph mixes the rows of a batch.
    """

    session: Session
    config: SessionConfig
    placement: Placement | None
    self_test: Verification | None
    fallbacks: tuple[str, ...] = ()
    slower: tuple[str, ...] = ()
    warmup_s: float = 0.0
    notes: tuple[str, ...] = ()
    replay: Replay | None = None
    made_up: MadeUp | None = None
    separate: bool = False


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
    engine = load_engine(config.engine)
    support = engine.probe(config.device)
    if not support.ok:
        raise EngineUnavailable(support.reason)
    session = artifacts.build_session(engine, config)
    try:
        proven = _prove(session, artifacts, config, requirements)
        if len(session.signature.outputs) == 1:
            return proven
        graph = artifacts.prepare_graph(config)
        builder = SubsetBuilder(
            engine=engine,
            graph=graph,
            config=config,
            artifacts=artifacts,
            requirements=requirements,
            made_up=proven.made_up,
        )
        subsets = SubsetSession(session, builder.build)
        return replace(proven, session=subsets, replay=proven.replay and replace(proven.replay, session=subsets))
    except BaseException:
        session.close()
        raise


def _prove(session: Session, artifacts: Artifacts, config: SessionConfig, requirements: Requirements) -> ProvenSession:
    _log.info("proving %s", config)
    version = artifacts.version
    check_signature(version, session.signature)
    limits = limits_of(artifacts.saved, config)
    trial = None if version.golden else _try_out(session, artifacts, config, requirements, limits)
    made_up = trial.made_up if trial else None
    if made_up and not draws_numbers(version.graph_path):
        check_repeats(session, made_up, limits)
    placement = read_placement(session, version.golden, made_up)
    notes = check_placement(config, placement, artifacts.saved)
    self_test, again = None, None
    if version.golden and requirements.self_test:
        self_test = replay(session, version.golden, limits, requirements.largest_batch, version.ranking)
        again = Replay.of_golden(session, version.golden, limits, version.ranking)
    elif version.golden:
        notes = (*notes, "self_test: off: the golden samples were not replayed")
    begun = time.monotonic()
    samples = version.golden or made_up
    warmup_note = warm_up(session, requirements.batch_sizes, samples, already=self_test is not None) if samples else ""
    if requirements.self_test and made_up:
        again = Replay.recorded(session, limits, made_up.feeds(session.signature))
    mixed = ""
    if not version.golden:
        size = requirements.largest_batch
        mixed = _find_mixed_rows(session, artifacts, config, largest_batch=size, made_up=made_up, limits=limits)
    return ProvenSession(
        session=session,
        config=config,
        placement=placement,
        self_test=self_test,
        warmup_s=time.monotonic() - begun,
        notes=tuple(
            filter(None, (*map(str, artifacts.replaced), *notes, trial.note if trial else "", warmup_note, mixed))
        ),
        replay=again,
        made_up=made_up,
        separate=bool(mixed),
    )


def _find_mixed_rows(
    session: Session,
    artifacts: Artifacts,
    config: SessionConfig,
    *,
    largest_batch: int,
    made_up: MadeUp | None,
    limits: Limits,
) -> str:
    """Why requests are computed one by one, as a note; empty where they may share a batch.

    Raises:
        LoweringError: Parts of a batch would be computed side by side, and its rows depend on each other.
    """
    if largest_batch < 2:
        return ""
    counted = [spec.name for spec in promised_signature(artifacts.version).outputs if spec.varies != spec.batchable]
    reason = f"output '{counted[0]}' is as long as its values say" if counted else ""
    reason = read_mixing(artifacts.version.graph_path) or reason or find_mixed_rows(session, made_up, limits)
    if not reason and config.streams > 1:  # which cut every batch up, rows that depend on each other, too
        with open_reference(artifacts.prepare_graph(replace(config, precision=None))) as reference:
            reason = find_mixed_rows(reference, made_up, limits)
    if reason and config.streams > 1:
        raise LoweringError(f"{config} cannot compute parts of a batch side by side", attempts=(reason,), hint=_STREAMS)
    return reason and f"requests are computed one by one: {reason}"


def _try_out(
    session: Session, artifacts: Artifacts, config: SessionConfig, requirements: Requirements, limits: Limits
) -> Trial:
    """Makes a request of a session whose version has no golden samples."""
    graph = artifacts.prepare_graph(replace(config, precision=None))
    if config.engine == REFERENCE_ENGINE and config.precision in (None, artifacts.saved):
        return try_as_saved(session, graph, open_reference)
    if requirements.self_test:
        return try_beside(session, graph, open_reference, limits)
    return try_as_saved(session, graph, open_reference)
