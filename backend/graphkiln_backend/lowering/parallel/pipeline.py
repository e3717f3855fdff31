"""A session whose graph is cut into stages: micro-batches follow each other through them, so that all stages work."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Semaphore

import numpy as np

from graphkiln_backend.engines.base import Placement, Session
from graphkiln_backend.graph.device import WAITING
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.parallel.placements import join_placements
from graphkiln_backend.lowering.parallel.sums import Handing, HostSums, Tensor
from graphkiln_backend.lowering.parallel.worker import Worker, results_of
from graphkiln_backend.system.closing import Closeable

Tensors = dict[str, Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage that is ready to run.

    Attributes:
        session: Computes it; owned by the pipeline.
        worker: The thread that runs it; owned by the pipeline.
        inputs: Names of the tensors that it reads.
        outputs: Names of the tensors that later stages or users read.
    """

    session: Session
    worker: Worker
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class PipelineSession(Closeable):
    """See `engines.base.Session`. Each stage computes in its own thread, micro-batch after micro-batch.

    Args:
        stages: In order.
        signature: Of the whole graph.
        micro_batches: Parts of a batch, as equal as they can be; 1 for graphs whose batch cannot be split.
        handing: How stages hand tensors on; in the memory of the process by default.

    Attributes:
        stages: Likewise; not to be run by anyone else.
    """

    def __init__(
        self, stages: Sequence[Stage], signature: Signature, micro_batches: int, handing: Handing | None = None
    ) -> None:
        self.stages = tuple(stages)
        self._signature = signature
        self._micro_batches = micro_batches
        self._handing = handing or HostSums()
        self._outputs = [spec.name for spec in signature.outputs]
        reads = [set(stage.inputs) for stage in self.stages]
        self._kept = [set(self._outputs).union(*reads[number + 1 :]) for number in range(len(reads))]
        # Of each border: one that the stage before computes, one that the stage behind does, and those in between.
        self._room = [Semaphore(WAITING + 2) for _ in self.stages[1:]]

    @property
    def signature(self) -> Signature:
        """The whole graph's."""
        return self._signature

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes outputs; see `engines.base.Session.run`. All of them are computed, whichever are requested.

        Raises:
            ExecutionError: Outputs of micro-batches cannot be joined; or as the stage that failed.
        """
        last = [self._start(part) for part in self._cut(feeds)]
        found, fetch = results_of(last), self._handing.fetch
        return {name: _join(name, [fetch(part[name]) for part in found]) for name in outputs or self._outputs}

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Runs the feeds as one micro-batch, stage after stage, and reads back what ran in all of them."""
        tensors, placements = dict(feeds), []
        for number, stage in enumerate(self.stages):
            own = {name: self._handing.fetch(tensors[name]) for name in stage.inputs}
            placements.append(stage.worker.submit(stage.session.placement, own).result())
            tensors = stage.worker.submit(self._advance, number, tensors).result()
        return join_placements(placements)

    def close(self) -> None:
        """Ends the threads, then frees all sessions."""
        for stage in self.stages:
            stage.worker.close()
        for stage in self.stages:
            stage.session.close()

    def _cut(self, feeds: Mapping[str, AnyArray]) -> list[Tensors]:
        """The micro-batches of a batch, as views."""
        rows = len(next(iter(feeds.values()))) if self._micro_batches > 1 else 1
        count = min(self._micro_batches, rows)
        if count <= 1:
            return [dict(feeds)]
        ends = [rows * number // count for number in range(count + 1)]
        spans = itertools.pairwise(ends)
        return [{name: array[begin:end] for name, array in feeds.items()} for begin, end in spans]

    def _start(self, tensors: Tensors) -> Future[Tensors]:
        """Sends a micro-batch on its way; what the last stage will come to."""
        first, *others = range(len(self.stages))
        future = self.stages[first].worker.submit(self._enter, tensors)
        for number in others:
            future = self.stages[number].worker.submit(self._follow, number, future)
        return future

    def _enter(self, tensors: Tensors) -> Tensors:
        """The first stage of a micro-batch."""
        self._wait_for_room(0)
        return self._advance(0, tensors)

    def _follow(self, number: int, before: Future[Tensors]) -> Tensors:
        """A stage of a micro-batch whose stage before was started earlier; it fails as that one does."""
        self._wait_for_room(number)
        try:
            return self._advance(number, before.result())
        finally:
            self._room[number - 1].release()

    def _wait_for_room(self, number: int) -> None:
        """Waits until the next stage is not far behind: what it has not come to yet takes memory."""
        if number < len(self._room):
            self._room[number].acquire()

    def _advance(self, number: int, tensors: Mapping[str, Tensor]) -> Tensors:
        """Computes a stage; what users and later stages need of all that is there by then."""
        stage = self.stages[number]
        fed = {name: tensors[name] for name in stage.inputs}
        computed = self._handing.run(stage.session, fed, stage.outputs)
        kept = {name: tensor for name, tensor in tensors.items() if name in self._kept[number]}
        return {**kept, **computed}


def _join(name: str, parts: Sequence[AnyArray]) -> AnyArray:
    """The outputs of micro-batches as that of the batch."""
    if len(parts) == 1:
        return parts[0]
    try:
        return np.concatenate(parts)
    except ValueError as error:
        shapes = ", ".join(str(list(part.shape)) for part in parts[:3])
        raise ExecutionError(
            f"output '{name}' has the shapes {shapes} in micro-batches, which cannot be joined",
            hint="its size follows from values: parallel: pipeline=N, micro_batches=1 computes batches whole",
        ) from error
