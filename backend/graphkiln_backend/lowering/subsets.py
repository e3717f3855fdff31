"""Outputs that nobody asks for are not computed.

A runtime computes every node of the graph that it has loaded, whatever is fetched (ONNX Runtime's
`only_execute_path_to_fetches` has an effect in training builds alone). So the first request for a part of the outputs
is answered by the whole graph, while a graph of that part is built beside it; later ones are answered by the part.
"""

from __future__ import annotations

import logging
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from graphkiln_backend.engines.base import Engine, Placement, Session, SessionConfig
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.graph.signature import Signature

_log = logging.getLogger("graphkiln.lowering")

_WORTH_DROPPING = 0.05
"""Share of the nodes that a part must save before it is worth holding its weights again."""
_MOST_SUBSETS = 4
"""Every part holds its weights again. Clients that ask for many different parts get them from the whole graph."""


class SubsetSession:
    """The session of a whole graph, and of those parts of it that were asked for. See `engines.base.Session`.

    Args:
        whole: The session of the whole graph; owned.
        build: Builds and proves the session of some outputs, or None where the part is hardly smaller than the whole.
    """

    def __init__(
        self,
        whole: Session,
        build: Callable[[tuple[str, ...]], Session | None],
    ) -> None:
        self._whole = whole
        self._build = build
        self._parts: dict[tuple[str, ...], Session] = {tuple(spec.name for spec in whole.signature.outputs): whole}
        self._builder: threading.Thread | None = None

    @property
    def signature(self) -> Signature:
        """The whole graph's."""
        return self._whole.signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes outputs, with the smallest graph that there is for them."""
        if outputs is None:
            return self._whole.run(feeds)
        wanted = tuple(outputs)
        session = self._parts.get(wanted)
        if session is None:
            session = self._whole
            self._ask_for(wanted)
        return session.run(feeds, wanted)

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """The whole graph's."""
        return self._whole.placement(feeds)

    def settle(self) -> None:
        """Waits until the part that is being built is there."""
        if self._builder:
            self._builder.join()

    def close(self) -> None:
        """Frees all sessions."""
        self.settle()
        for session in {id(session): session for session in self._parts.values()}.values():
            session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _ask_for(self, names: tuple[str, ...]) -> None:
        """Starts building a part; one at a time."""
        if len(self._parts) <= _MOST_SUBSETS and not (self._builder and self._builder.is_alive()):
            self._builder = threading.Thread(target=self._add, args=(names,), name="graphkiln-subset", daemon=True)
            self._builder.start()

    def _add(self, names: tuple[str, ...]) -> None:
        what = f"output{'s' if len(names) > 1 else ''} {', '.join(names)}"
        try:
            part = self._build(names)
        except (GraphkilnError, OSError) as error:
            _log.warning("no graph for %s alone: %s", what, error)
            part = None
        else:
            _log.info("%s alone: %s answers", what, "a graph of that part" if part else "the whole graph")
        self._parts[names] = part or self._whole


def build_part(
    outputs: tuple[str, ...],
    *,
    engine: Engine,
    graph: Path,
    step: SessionConfig,
    prove: Callable[[Session, tuple[str, ...]], None],
    check_unchanged: Callable[[], None],
) -> Session | None:
    """Builds the session of some outputs; None where its graph would be hardly smaller.

    Args:
        outputs: Names.
        engine: Builds it.
        graph: The whole graph.
        step: How the whole graph runs.
        prove: Raises when the session must not answer.
        check_unchanged: Raises when the graph's file is not the one that the whole session was made of.

    Raises:
        LoweringError: The graph's file has changed since.
    """
    from graphkiln_backend.passes.outputs import keep_outputs  # a second of imports, which most servers need not pay

    with tempfile.TemporaryDirectory(prefix="graphkiln-part-") as folder:
        path = Path(folder) / graph.name
        dropped = keep_outputs(graph, outputs, path)
        check_unchanged()
        if dropped < _WORTH_DROPPING:
            return None
        session = engine.build(path, replace(step, shared_folder=None))
    try:
        prove(session, outputs)
    except BaseException:
        session.close()
        raise
    return session
