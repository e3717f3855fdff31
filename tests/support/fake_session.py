"""A session that computes by a function, in place of an engine's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Dim, Signature, TensorSpec
from graphkiln_backend.system.closing import Closeable

Feeds = Mapping[str, AnyArray]


def spec(name: str, *shape: Dim, dtype: DType = DType.FP32) -> TensorSpec:
    """Specification of a tensor."""
    return TensorSpec(name=name, dtype=dtype, shape=shape)


class FakeSession(Closeable):
    """Compute by a function, and record all runs.

    Args:
        signature: Inputs and outputs.
        compute: Maps feeds to all outputs.

    Attributes:
        feeds: Feeds of each run.
        outputs: Requested outputs of each run.
        threads: Threads of the runs.
        closed: Number of calls of `close`.
    """

    def __init__(self, signature: Signature, compute: Callable[[Feeds], Mapping[str, Any]]) -> None:
        self.signature = signature
        self.compute = compute
        self.feeds: list[Feeds] = []
        self.outputs: list[tuple[str, ...] | None] = []
        self.threads: set[int] = set()
        self.closed = 0

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shape of the first input of each run."""
        return [next(iter(feeds.values())).shape for feeds in self.feeds]

    @property
    def rows(self) -> list[int]:
        """Rows of the first input of each run."""
        return [shape[0] for shape in self.shapes]

    def run(self, feeds: Feeds, outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute the requested outputs, or all."""
        self.feeds.append(feeds)
        self.threads.add(threading.get_ident())
        self.outputs.append(None if outputs is None else tuple(outputs))
        computed = self.compute(feeds)
        return {name: computed[name] for name in (computed if outputs is None else outputs)}

    def placement(self, feeds: Feeds) -> Placement:
        """One node for each input, and one product."""
        return Placement(nodes={"fake": len(feeds)}, precision=Precision.FP32, products={Precision.FP32: 1})

    def close(self) -> None:
        """Count the calls."""
        self.closed += 1
