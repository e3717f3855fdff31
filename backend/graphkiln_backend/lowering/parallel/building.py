"""The session of a split graph: an engine's session for each shard of each part, in threads on their own cores.

A graph is cut into stages, which work on micro-batches that follow each other (`PipelineSession`). The products of a
stage may be computed in shards, each with a part of the weights (`ShardedSession`).

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.
"""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from threading import Semaphore
from typing import Any, ParamSpec, TypeVar

import numpy as np

from graphkiln_backend.engines.base import DeviceSession, Engine, KernelType, Placement, Session, SessionConfig
from graphkiln_backend.graph.device import WAITING, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, LoweringError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.parts import Part, Parts, PreparedParts, config_at, graph_of, read_parts
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import stay_on

# Transport of tensors between the stages and shards of a split graph, and the sums that join shards.
#
# On the CPU all of them are threads of one process: tensors are read where they were computed, and sums are added there.
# On GPUs tensors stay where they were computed; the engine copies what a stage hands to the next one's GPU, and NCCL adds
# the partial sums of shards from GPU to GPU. All shards of a stage are threads of one process, which has a communicator
# of all its GPUs (`torch.cuda.nccl`): no other process need be found, and none can be lost.
#
# GPUs: not yet run on any; built from the documentation, and tested on the CPU with everything but NCCL itself.
#
# Source: NVIDIA, "NCCL User Guide" (one process, several devices); PyTorch, `torch.cuda.nccl`; ONNX Runtime, "I/O
# Binding".

_log = logging.getLogger("graphkiln.lowering")

Tensor = Any  # an array, or a tensor on a device: whatever `run` returns


class HostTransport:
    """Tensors in the memory of the process."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Compute a part in the thread of its stage or shard.

        Args:
            session: Session of the part.
            feeds: Arrays of the request, and what `run` or `add` returned before.
            outputs: Names.
        """
        return session.run(feeds, outputs)

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """Add equal shapes in the order of the shards into new arrays, and return the sum for each of them."""
        total = partials[0].copy()
        for partial in partials[1:]:
            np.add(total, partial, out=total)
        return [total] * len(partials)

    def fetch(self, tensor: Tensor) -> AnyArray:
        """Return a tensor as an array in the memory of the process."""
        array: AnyArray = tensor
        return array


class DeviceTransport(HostTransport):
    """Tensors on the GPUs that computed them. Sums need PyTorch: the same GPUs give the same bits each time."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `HostTransport.run`; for sessions that `choose_transport` has checked."""
        on_device: Any = session  # a check at each run would cost more than handing a small tensor on
        found: Mapping[str, Tensor] = on_device.run_on_device(feeds, outputs)
        return found

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `HostTransport.add`.

        Raises:
            ExecutionError: NCCL failed: a GPU, or the link between two, is lost.
        """
        import torch  # which nothing else in a server needs

        library: Any = torch
        tensors = [library.from_dlpack(partial) for partial in partials]
        totals = [library.empty_like(tensor) for tensor in tensors]
        if not tensors[0].numel():
            return totals
        try:
            library.cuda.nccl.all_reduce(tensors, totals)
            for total in totals:
                library.cuda.synchronize(total.device)  # sessions run on streams of their own
        except RuntimeError as error:
            raise ExecutionError(f"NCCL failed: {error}") from error
        return totals

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `HostTransport.fetch`."""
        if isinstance(tensor, np.ndarray):  # of the request
            return tensor
        return np.array((tensor.cpu() if hasattr(tensor, "cpu") else tensor).numpy())


def choose_transport(places: Sequence[Place], sessions: Sequence[Session], *, adds: bool) -> HostTransport:
    """Choose how the stages of a pipeline or the shards of a stage hand tensors to each other.

    Args:
        places: Places of all of them.
        sessions: All of them.
        adds: Whether they are shards, whose partial sums are added.
    """
    if not all(place.device.is_gpu for place in places) or (len(sessions) == 1 and not adds):
        return HostTransport()
    if reason := (_why_not_by_nccl() if adds else "") or _why_not_on_device(sessions):
        what = "sums of shards are added in the memory of the host" if adds else "stages pass on tensors by the host"
        _log.warning("%s, which is slower: %s", what, reason)
        return HostTransport()
    return DeviceTransport()


def _why_not_on_device(sessions: Sequence[Session]) -> str:
    for session in sessions:
        if not isinstance(session, DeviceSession):
            return f"{type(session).__name__} does not leave its tensors on a device"
        if session.why_not_on_device:
            return session.why_not_on_device
    return ""


def _why_not_by_nccl() -> str:
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'graphkiln[parallel]')"
    try:
        from torch import distributed
    except (ImportError, OSError) as error:  # a library of CUDA that is not there
        return f"PyTorch cannot be used: {error}"
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this build of PyTorch has no NCCL (pip install a build for CUDA)"
    return ""


P = ParamSpec("P")
T = TypeVar("T")
Tensors = dict[str, Tensor]


def build_split(engine: Engine, prepared: PreparedParts, config: SessionConfig, signature: Signature) -> Session:
    """Build the session of a split graph.

    Args:
        engine: Builds the sessions of the parts.
        prepared: Graphs or compiled parts.
        config: Configuration of the whole graph; spread by its `parallel` and `places`.
        signature: Signature of the whole graph: its order of tensors.

    Raises:
        GraphkilnError: The engine refuses a part, or `prepared` cannot be read; nothing stays open.
    """
    numbers = config.parallel
    if numbers is None:
        raise LoweringError("there is nothing to split", attempts=("the configuration has no `parallel`",))
    builder = _Builder(engine, prepared, config, read_parts(prepared.folder))
    with ExitStack() as opened:
        stages = [builder.build_stage(number, opened) for number in range(builder.parts.stages)]
        whole = _whole_signature(signature, [stage.session.signature for stage in stages])
        transport = choose_transport(config.places, [stage.session for stage in stages], adds=False)
        opened.pop_all()
    return PipelineSession(stages, whole, numbers.micro_batches or 1, transport)


@dataclass(frozen=True, slots=True)
class _Builder:
    engine: Engine
    prepared: PreparedParts
    config: SessionConfig
    parts: Parts

    def build_stage(self, number: int, opened: ExitStack) -> Stage:
        """A stage: its only session in the stage's thread, or those of all its shards in threads of their own."""
        places = self.config.places[number * self.parts.shards : (number + 1) * self.parts.shards]
        parts = self.parts.of_stage(number)
        worker = Worker((core for place in places for core in place.cores), f"graphkiln-stage-{number}")
        opened.callback(worker.close)
        if self.parts.shards == 1:
            ((part_number, _),) = parts
            session = self._build(part_number, 0, places[0], worker)
        else:
            session = self._build_shards(parts, places)
        opened.callback(session.close)
        return Stage(
            session=session,
            worker=worker,
            inputs=tuple(spec.name for spec in session.signature.inputs),
            outputs=tuple(spec.name for spec in session.signature.outputs),
        )

    def _build_shards(self, parts: Sequence[tuple[int, Part]], places: Sequence[Place]) -> ShardedSession:
        with ExitStack() as opened:
            workers = [Worker(place.cores, f"graphkiln-shard-{number}") for number, place in enumerate(places)]
            for worker in workers:
                opened.callback(worker.close)
            segments = []
            for number, part in parts:
                sessions = []
                for shard, (place, worker) in enumerate(zip(places, workers, strict=True)):
                    sessions.append(self._build(number, shard, place, worker))
                    opened.callback(sessions[-1].close)
                segments.append(
                    Segment(sessions=tuple(sessions), inputs=part.inputs, outputs=part.outputs, reduced=part.reduced)
                )
            all_sessions = [session for segment in segments for session in segment.sessions]
            transport = choose_transport(places, all_sessions, adds=True)
            opened.pop_all()
        return ShardedSession(segments, workers, _stage_signature(segments), transport)

    def _build(self, part: int, shard: int, place: Place, worker: Worker) -> Session:
        """The session of one graph, built in the thread that will run it: its own threads stay on the same cores."""
        graph, compiled = graph_of(self.prepared.folder, part, shard), self.prepared.compiled.get((part, shard))
        return worker.submit(self.engine.build, graph, config_at(self.config, place), compiled).result()


def _stage_signature(segments: Sequence[Segment]) -> Signature:
    """The tensors of a stage as its first shard sees them; a sum has the type and shape of its parts."""
    inputs: dict[str, TensorSpec] = {}
    outputs: dict[str, TensorSpec] = {}
    for segment in segments:
        signature = segment.sessions[0].signature
        inputs |= {spec.name: spec for spec in signature.inputs if spec.name not in outputs and spec.name not in inputs}
        for spec in signature.outputs:
            name = segment.reduced.get(spec.name, spec.name)
            outputs[name] = replace(spec, name=name)
    return Signature(inputs=tuple(inputs.values()), outputs=tuple(outputs.values()))


def _whole_signature(whole: Signature, stages: Sequence[Signature]) -> Signature:
    """The tensors of the whole graph in its order, as the stages see them."""
    inputs = {spec.name: spec for stage in stages for spec in stage.inputs}
    outputs = {spec.name: spec for stage in stages for spec in stage.outputs}
    missing = [spec.name for spec in whole.inputs if spec.name not in inputs]
    missing += [spec.name for spec in whole.outputs if spec.name not in outputs]
    if missing:
        raise LoweringError("a part of the graph is missing", attempts=(f"no stage has '{missing[0]}'",))
    return Signature(
        inputs=tuple(inputs[spec.name] for spec in whole.inputs),
        outputs=tuple(outputs[spec.name] for spec in whole.outputs),
    )


class Worker(Closeable):
    """A thread that stays on some cores, and computes one thing after the other.

    A runtime that is built in it starts its own threads there, which stay on the same cores.

    Args:
        cores: Numbers of the cores; empty for any.
        name: Name of the thread.
    """

    def __init__(self, cores: Iterable[int] = (), name: str = "graphkiln-stage") -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=stay_on, initargs=(tuple(cores),)
        )

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Run a function after all that was submitted before, in the caller's context (`contextvars`)."""
        return self._pool.submit(copy_context().run, partial(call, *args, **kwargs))

    def close(self) -> None:
        """Wait for what runs, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def results_of(futures: Iterable[Future[T]]) -> list[T]:
    """Return the results in order, or raise the first error, when none runs any more: they read the caller's arrays."""
    listed = list(futures)
    wait(listed)
    return [future.result() for future in listed]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part that all shards of a stage compute side by side, until the next sum.

    Attributes:
        sessions: One for each shard; owned by the session of all of them.
        inputs: Names of the tensors that each reads.
        outputs: Names of those that each computes.
        reduced: Outputs that are partial sums: name -> name of the sum.
    """

    sessions: tuple[Session, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: Mapping[str, str] = field(default_factory=dict)


class ShardedSession(Closeable):
    """A stage in shards; see `engines.base.Session`. The same request gets the same bits.

    Args:
        segments: In order.
        workers: One for each shard; owned.
        signature: Signature of the stage.
        transport: Transport of tensors between shards.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        workers: Sequence[Worker],
        signature: Signature,
        transport: HostTransport | None = None,
    ) -> None:
        self.signature = signature
        self._segments = tuple(segments)
        self._workers = tuple(workers)
        self._transport = transport or HostTransport()

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`. All of them are computed, whichever are requested."""
        tensors = [dict(feeds) for _ in self._workers]
        for segment in self._segments:
            self._advance(segment, tensors)
        names = outputs or [spec.name for spec in self.signature.outputs]
        return {name: self._transport.fetch(tensors[0][name]) for name in names}  # every shard has the same

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds, and read back what ran in the segments of all shards."""
        tensors = [dict(feeds) for _ in self._workers]
        placements = []
        for segment in self._segments:
            for worker, session, own in zip(self._workers, segment.sessions, tensors, strict=True):
                fed = {name: self._transport.fetch(own[name]) for name in segment.inputs}
                placements.append(worker.submit(session.placement, fed).result())
            self._advance(segment, tensors)
        return _join_placements(placements)

    def close(self) -> None:
        """End the threads, then free all sessions."""
        for worker in self._workers:
            worker.close()
        for segment in self._segments:
            for session in segment.sessions:
                session.close()

    def _advance(self, segment: Segment, tensors: Sequence[Tensors]) -> None:
        """Compute a segment on all shards, and add their partial sums."""
        started = [
            worker.submit(self._transport.run, session, {name: own[name] for name in segment.inputs}, segment.outputs)
            for worker, session, own in zip(self._workers, segment.sessions, tensors, strict=True)
        ]
        computed = results_of(started)
        for own, found in zip(tensors, computed, strict=True):
            own.update(found)
        for name, total in segment.reduced.items():
            summed = self._transport.add([found[name] for found in computed])
            for own, each in zip(tensors, summed, strict=True):
                own[total] = each
                del own[name]


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A stage that is ready to run; session and worker are owned by the pipeline.

    Attributes:
        session: Computes it.
        worker: Thread that runs it.
        inputs: Names of the tensors that it reads.
        outputs: Names of the tensors that later stages or users read.
    """

    session: Session
    worker: Worker
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class PipelineSession(Closeable):
    """A graph in stages; see `engines.base.Session`. Each computes in its own thread, micro-batch after micro-batch.

    Args:
        stages: In order.
        signature: Signature of the whole graph.
        micro_batches: Parts of a batch, as equal as they can be; 1 for graphs whose batch cannot be split.
        transport: Transport of tensors between stages.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        signature: Signature,
        micro_batches: int,
        transport: HostTransport | None = None,
    ) -> None:
        self.stages = tuple(stages)
        self.signature = signature
        self._micro_batches = micro_batches
        self._transport = transport or HostTransport()
        self._outputs = [spec.name for spec in signature.outputs]
        reads = [set(stage.inputs) for stage in self.stages]
        self._kept = [set(self._outputs).union(*reads[number + 1 :]) for number in range(len(reads))]
        # Of each border: one that the stage before computes, one that the stage behind does, and those in between.
        self._room = [Semaphore(WAITING + 2) for _ in self.stages[1:]]

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`. All of them are computed, whichever are requested.

        Raises:
            ExecutionError: Outputs of micro-batches cannot be joined; or as the stage that failed.
        """
        last = [self._start(part) for part in self._cut(feeds)]
        found, fetch = results_of(last), self._transport.fetch
        return {name: _join(name, [fetch(part[name]) for part in found]) for name in outputs or self._outputs}

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds as one micro-batch, stage after stage, and read back what ran in all of them."""
        tensors, placements = dict(feeds), []
        for number, stage in enumerate(self.stages):
            own = {name: self._transport.fetch(tensors[name]) for name in stage.inputs}
            placements.append(stage.worker.submit(stage.session.placement, own).result())
            tensors = stage.worker.submit(self._compute, number, tensors).result()
        return _join_placements(placements)

    def close(self) -> None:
        """End the threads, then free all sessions."""
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
        """Send a micro-batch through all stages; the future is that of the last one."""
        first, *others = self.stages
        future = first.worker.submit(self._advance, 0, tensors)
        for number, stage in enumerate(others, start=1):
            future = stage.worker.submit(self._advance, number, future)
        return future

    def _advance(self, number: int, given: Tensors | Future[Tensors]) -> Tensors:
        """Compute a stage of a micro-batch whose stage before was started earlier; it fails as that one does."""
        if number < len(self._room):
            self._room[number].acquire()  # what the next stage has not come to yet takes memory
        try:
            return self._compute(number, given.result() if isinstance(given, Future) else given)
        finally:
            if number:
                self._room[number - 1].release()

    def _compute(self, number: int, tensors: Mapping[str, Tensor]) -> Tensors:
        """Compute a stage, and return what users and later stages need of all that is there by then."""
        stage = self.stages[number]
        fed = {name: tensors[name] for name in stage.inputs}
        computed = self._transport.run(stage.session, fed, stage.outputs)
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


def _join_placements(parts: Sequence[Placement]) -> Placement:
    """Add up what ran; the precision is that of the part with the most products."""
    nodes, products = Counter[str](), Counter[KernelType]()
    for part in parts:
        nodes.update(part.nodes)
        products.update(part.products)
    largest = max(parts, key=lambda part: (sum(part.products.values()), sum(part.nodes.values())))
    elsewhere = tuple(name for part in parts for name in part.elsewhere)
    return Placement(nodes=dict(nodes), precision=largest.precision, products=dict(products), elsewhere=elsewhere)
