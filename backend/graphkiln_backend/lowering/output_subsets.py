"""Smaller graphs for requests that ask for only some of the outputs.

A runtime computes every node of a loaded graph, whichever outputs are requested (ONNX Runtime's
`only_execute_path_to_fetches` works only in training builds). The first request for a subset of the outputs is served
by the whole graph, while a background thread builds a graph of the subset for later requests.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from graphkiln_backend.engines.base import Engine, Placement, Session, SessionConfig
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import Requirements, check_golden, check_signature, limits_of
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.trial import SyntheticInputs
from graphkiln_backend.lowering.warmup import warm_up
from graphkiln_backend.system.closing import Closeable

_log = logging.getLogger("graphkiln.lowering")

_WORTH_DROPPING = 0.05  # share of nodes that a subset must save, since it holds its weights a second time
_MOST_SUBSETS = 4  # further subsets are served by the whole graph


class SubsetSession(Closeable):
    """Session of a whole graph and of the output subsets that were requested; see `engines.base.Session`.

    Args:
        whole: Session of the whole graph; owned.
        build: Builds and verifies the session of some outputs; returns None if it would hardly be smaller.
    """

    def __init__(self, whole: Session, build: Callable[[tuple[str, ...]], Session | None]) -> None:
        self._whole = whole
        self._build = build
        self._parts: dict[tuple[str, ...], Session] = {tuple(spec.name for spec in whole.signature.outputs): whole}
        self._builder: threading.Thread | None = None

    @property
    def signature(self) -> Signature:
        """Signature of the whole graph."""
        return self._whole.signature

    @property
    def parts(self) -> tuple[tuple[str, ...], ...]:
        """Outputs of each subset graph that serves."""
        return tuple(names for names, session in tuple(self._parts.items()) if session is not self._whole)

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs with the smallest graph that is ready."""
        if outputs is None:
            return self._whole.run(feeds)
        names = tuple(outputs)
        session = self._parts.get(names)
        if session is None:
            session = self._whole
            if len(self._parts) <= _MOST_SUBSETS and not (self._builder and self._builder.is_alive()):
                self._builder = threading.Thread(target=self._add, args=(names,), name="graphkiln-subset", daemon=True)
                self._builder.start()
        return session.run(feeds, names)

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Placement of the whole graph."""
        return self._whole.placement(feeds)

    def settle(self) -> None:
        """Wait for a build in progress."""
        if self._builder:
            self._builder.join()

    def close(self) -> None:
        """Free all sessions."""
        self.settle()
        for session in {id(session): session for session in self._parts.values()}.values():
            session.close()

    def _add(self, names: tuple[str, ...]) -> None:
        what = f"output{'s' if len(names) > 1 else ''} {', '.join(names)}"
        try:
            part = self._build(names)
        except (GraphkilnError, OSError) as error:
            _log.warning("cannot build a graph for %s alone: %s", what, error)
            part = None
        else:
            _log.info("%s alone: served by %s", what, "a smaller graph" if part else "the whole graph")
        self._parts[names] = part or self._whole


def build_subset(
    outputs: tuple[str, ...],
    *,
    graph: Path,
    engine: Engine,
    config: SessionConfig,
    artifacts: Artifacts,
    requirements: Requirements,
    synthetic: SyntheticInputs | None = None,
) -> Session | None:
    """Build and verify the session of some outputs; return None if its graph would hardly be smaller.

    Does not use the artifact cache, which is not thread-safe.

    Args:
        outputs: Names of the outputs.
        graph: The whole graph.
        engine: Engine of the whole graph.
        config: Configuration of the whole graph.
        artifacts: Artifacts of the version.
        requirements: Requirements on a session.
        synthetic: Inputs that the whole graph accepts, or None.

    Raises:
        LoweringError: The graph file changed since the whole session was built, or the engine refuses the subset.
        GraphkilnError: The session fails its verification.
    """
    from graphkiln_backend.passes.edge_passes import keep_outputs  # a second of imports, which few servers need

    with tempfile.TemporaryDirectory(prefix="graphkiln-part-") as folder:
        path = Path(folder) / graph.name
        dropped = keep_outputs(graph, outputs, path)
        artifacts.check_unchanged()
        if dropped < _WORTH_DROPPING:
            return None
        session = engine.build(path, replace(config, shared_folder=None))
    with ExitStack() as opened:
        opened.enter_context(session)
        version = artifacts.version
        check_signature(version, session.signature, outputs)
        golden = version.golden and version.golden.only(outputs)
        if golden and requirements.self_test:
            limits = limits_of(artifacts.saved, config, version.adoption)
            check_golden(session, golden, limits, requirements.largest_batch, version.reading)
        samples = golden or synthetic
        everything = config.device.is_gpu
        if samples and (failure := warm_up(session, requirements.batch_sizes, samples, everything=everything).note):
            raise LoweringError("the smaller graph fails where the whole graph does not", attempts=(failure,))
        opened.pop_all()
    return session
