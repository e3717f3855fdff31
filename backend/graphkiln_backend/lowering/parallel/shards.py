"""A session whose products are computed in shards: each device holds a part of the weights, and sums join them.

The shards run one segment after the other, side by side. Behind a segment whose output is a partial sum, the shards'
outputs are added, in the same way each time: the same request gets the same bits.

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from graphkiln_backend.engines.base import Placement, Session
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.parallel.placements import join_placements
from graphkiln_backend.lowering.parallel.sums import HostSums, Sums, Tensor
from graphkiln_backend.lowering.parallel.worker import Worker, results_of
from graphkiln_backend.system.closing import Closeable

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """What the shards compute between two sums.

    Attributes:
        sessions: One for each shard; owned by the session of all of them.
        inputs: Names of the tensors that each reads.
        outputs: Names of those that each computes.
        reduced: Of outputs that are partial sums: name -> name of the sum.
    """

    sessions: tuple[Session, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: Mapping[str, str] = field(default_factory=dict)


class ShardedSession(Closeable):
    """See `engines.base.Session`. One thread for each shard.

    Args:
        segments: In order.
        workers: One for each shard; owned.
        signature: Of the graph that the segments are.
        sums: How they hand tensors to each other; in the memory of the process by default.

    Attributes:
        sums: Likewise; who measures what sums take puts its own around it, between two runs.
    """

    def __init__(
        self, segments: Sequence[Segment], workers: Sequence[Worker], signature: Signature, sums: Sums | None = None
    ) -> None:
        self.sums = sums or HostSums()
        self._segments = tuple(segments)
        self._workers = tuple(workers)
        self._signature = signature
        self._outputs = [spec.name for spec in signature.outputs]

    @property
    def signature(self) -> Signature:
        """The graph's."""
        return self._signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`. All of them are computed, whichever are requested."""
        tensors = [dict(feeds) for _ in self._workers]
        for segment in self._segments:
            self._advance(segment, tensors)
        fetch = self.sums.fetch
        return {name: fetch(tensors[0][name]) for name in outputs or self._outputs}  # every shard has the same

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Runs the feeds, and reads back what ran in the segments of all shards."""
        tensors = [dict(feeds) for _ in self._workers]
        placements = []
        for segment in self._segments:
            for worker, session, own in zip(self._workers, segment.sessions, tensors, strict=True):
                fed = {name: self.sums.fetch(own[name]) for name in segment.inputs}
                placements.append(worker.submit(session.placement, fed).result())
            self._advance(segment, tensors)
        return join_placements(placements)

    def close(self) -> None:
        """Ends the threads, then frees all sessions."""
        for worker in self._workers:
            worker.close()
        for segment in self._segments:
            for session in segment.sessions:
                session.close()

    def _advance(self, segment: Segment, tensors: Sequence[Tensors]) -> None:
        """Computes a segment on all shards, and adds what they are partial sums of."""
        started = [
            worker.submit(self.sums.run, session, {name: own[name] for name in segment.inputs}, segment.outputs)
            for worker, session, own in zip(self._workers, segment.sessions, tensors, strict=True)
        ]
        computed = results_of(started)
        for own, found in zip(tensors, computed, strict=True):
            own.update(found)
        for name, total in segment.reduced.items():
            summed = self.sums.add([found[name] for found in computed])
            for own, each in zip(tensors, summed, strict=True):
                own[total] = each
                del own[name]
