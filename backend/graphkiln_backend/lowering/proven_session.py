"""Builds one session and proves it: its tensors, what really ran, the golden outputs, every batch size."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, replace

from graphkiln_backend.engines.base import Placement, Session, SessionConfig
from graphkiln_backend.engines.registry import load_engine
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.lowering.acceptance import (
    Requirements,
    check_placement,
    check_signature,
    limits_of,
    read_placement,
    replay,
)
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.output_subsets import SubsetBuilder, SubsetSession
from graphkiln_backend.lowering.replaying import Replay
from graphkiln_backend.lowering.warmup import warm_up

_log = logging.getLogger("graphkiln.lowering")


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
            engine=engine, graph=graph, config=config, artifacts=artifacts, requirements=requirements
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
    placement = read_placement(session, version.golden)
    notes = check_placement(config, placement, artifacts.saved)
    self_test, again = None, None
    limits = limits_of(artifacts.saved, config)
    if version.golden and requirements.self_test:
        self_test = replay(session, version.golden, limits, requirements.largest_batch, version.ranking)
        again = Replay.of_golden(session, version.golden, limits, version.ranking)
    elif version.golden:
        notes = (*notes, "self_test: off: the golden samples were not replayed")
    begun = time.monotonic()
    warmup_note = warm_up(session, requirements.batch_sizes, version.golden, already=self_test is not None)
    if requirements.self_test and not version.golden:
        again = Replay.recorded(session, limits)
    return ProvenSession(
        session=session,
        config=config,
        placement=placement,
        self_test=self_test,
        warmup_s=time.monotonic() - begun,
        notes=tuple(filter(None, (*map(str, artifacts.replaced), *notes, warmup_note))),
        replay=again,
    )
