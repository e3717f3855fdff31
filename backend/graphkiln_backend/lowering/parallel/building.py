"""Builds the session of a split graph: an engine's session for each shard of each part, in a thread on its cores."""

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
from typing import Any, ParamSpec, Protocol, TypeVar

import numpy as np

from graphkiln_backend.engines.base import DeviceSession, Engine, KernelType, Placement, Session, SessionConfig
from graphkiln_backend.graph.device import WAITING, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, LoweringError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.parts import Part, Parts, PreparedParts, config_at, graph_of, read_parts
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import stay_on

# What ran in all parts of a split graph, as if it were one.


def join_placements(parts: Sequence[Placement]) -> Placement:
    """Adds up what ran; the precision is that of the part with the most products.

    Args:
        parts: At least one.
    """
    nodes, products = Counter[str](), Counter[KernelType]()
    for part in parts:
        nodes.update(part.nodes)
        products.update(part.products)
    largest = max(parts, key=lambda part: (sum(part.products.values()), sum(part.nodes.values())))
    elsewhere = tuple(name for part in parts for name in part.elsewhere)
    return Placement(nodes=dict(nodes), precision=largest.precision, products=dict(products), elsewhere=elsewhere)


# How stages and shards hand tensors to each other: where these are, and what adds partial sums.
#
# On the CPU all of them are threads of one process: what one computes, the others read where it lies, and sums are
# added there. Between GPUs that would be twice the way over the host; see `device_sums`.

Tensor = Any  # an array, or a tensor on a device: whatever `run` gives


class Handing(Protocol):
    """Runs sessions whose outputs others read."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Computes a part; called by the thread of its stage or shard.

        Args:
            session: Of the part.
            feeds: Arrays of the request, and what `run` gave before, or `Sums.add`.
            outputs: Names.

        Raises:
            GraphkilnError: As `Session.run`.
        """
        ...

    def fetch(self, tensor: Tensor) -> AnyArray:
        """A tensor of a shard as an array in the memory of the process."""
        ...


class Sums(Handing, Protocol):
    """Adds what shards computed, too; used by one thread."""

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sum of what shards computed, for each of them; none of the partial sums is changed.

        Args:
            partials: Of equal shapes, shard by shard.
        """
        ...


class HostSums:
    """In the memory of the process; see `Sums`."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Handing.run`."""
        return session.run(feeds, outputs)

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Sums.add`: every shard reads the same array."""
        return [add_up(partials)] * len(partials)

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `Handing.fetch`."""
        array: AnyArray = tensor
        return array


def add_up(partials: Sequence[AnyArray]) -> AnyArray:
    """The sum of what shards computed, in their order: a new array.

    Args:
        partials: Of equal shapes, at least one.
    """
    total = partials[0].copy()
    for part in partials[1:]:
        np.add(total, part, out=total)
    return total


# A thread of its own for each stage and each shard, on its own cores.

P = ParamSpec("P")
T = TypeVar("T")


class Worker(Closeable):
    """Runs what it is given, one after the other, in a thread that stays on some cores.

    What a runtime builds in it starts its own threads there, which stay on the same cores.

    Args:
        cores: Numbers of the cores; empty for any.
        name: Of the thread.
    """

    def __init__(self, cores: Iterable[int] = (), name: str = "graphkiln-stage") -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=stay_on, initargs=(tuple(cores),)
        )

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Runs a function after all that was submitted before, in the caller's context (`contextvars`)."""
        return self._pool.submit(copy_context().run, partial(call, *args, **kwargs))

    def close(self) -> None:
        """Waits for what runs, and ends the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def results_of(futures: Iterable[Future[T]]) -> list[T]:
    """What all of them came to, in order; returns when none runs any more, also where one failed.

    Whoever fed them may use their arrays for other things as soon as this returns.

    Raises:
        Exception: What the first one that failed raised.
    """
    listed = list(futures)
    wait(listed)
    return [future.result() for future in listed]


# A session whose products are computed in shards: each device holds a part of the weights, and sums join them.
#
# The shards run one segment after the other, side by side. Behind a segment whose output is a partial sum, the shards'
# outputs are added, in the same way each time: the same request gets the same bits.
#
# Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019.

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


# A session whose graph is cut into stages: micro-batches follow each other through them, so that all stages work.


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


# Stages and shards on GPUs: tensors stay where they were computed, and NCCL adds those of shards from GPU to GPU.
#
# All shards of a stage are threads of one process, which has a communicator of all its GPUs (`torch.cuda.nccl`): no
# other process need be found, and none can be lost. What a stage hands on is copied to the next one's GPU by the
# engine.
#
# Not yet run on GPUs: built from the documentation, and tested on the CPU with everything but NCCL itself.
#
# Source: NVIDIA, "NCCL User Guide" (one process, several devices); PyTorch, `torch.cuda.nccl`; ONNX Runtime, "I/O
# Binding".

_log = logging.getLogger("graphkiln.lowering")


class DeviceHanding:
    """Between stages on GPUs; see `Handing`."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Handing.run`; of sessions that `handing_for` has looked at."""
        return _run_on_device(session, feeds, outputs)

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `Handing.fetch`."""
        array: AnyArray = tensor if isinstance(tensor, np.ndarray) else np.array(tensor.numpy())
        return array


class DeviceSums:
    """Between shards on GPUs; see `Sums`. The same GPUs give the same bits each time, in an order of NCCL's own.

    Raises:
        ImportError: PyTorch is not installed.
    """

    def __init__(self) -> None:
        import torch  # which nothing else in a server needs

        self._torch: Any = torch

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Handing.run`; of sessions that `sums_for` has looked at."""
        return _run_on_device(session, feeds, outputs)

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Sums.add`: each GPU has the sum for itself.

        Raises:
            ExecutionError: NCCL failed: a GPU, or the link between two, is lost.
        """
        tensors = [self._torch.from_dlpack(partial) for partial in partials]
        totals = [self._torch.empty_like(tensor) for tensor in tensors]
        if not tensors[0].numel():
            return totals
        try:
            self._torch.cuda.nccl.all_reduce(tensors, totals)
            for total in totals:
                self._torch.cuda.synchronize(total.device)  # sessions run on streams of their own
        except RuntimeError as error:
            raise ExecutionError(f"NCCL failed: {error}") from error
        return totals

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `Handing.fetch`."""
        if isinstance(tensor, np.ndarray):  # of the request
            return tensor
        array: AnyArray = self._torch.from_dlpack(tensor).cpu().numpy()
        return array


def handing_for(places: Sequence[Place], sessions: Sequence[Session]) -> Handing:
    """How the stages of a pipeline hand tensors on where they run.

    Args:
        places: Of all of them.
        sessions: Of each.
    """
    if len(sessions) == 1 or not _on_gpus(places):
        return HostSums()
    if reason := _why_not_on_device(sessions):
        _log.warning("what stages hand on passes through the memory of the host, which is slower: %s", reason)
        return HostSums()
    return DeviceHanding()


def sums_for(places: Sequence[Place], sessions: Sequence[Session]) -> Sums:
    """How the shards of a stage are added up where they run.

    Args:
        places: Of the shards.
        sessions: All of them.
    """
    if not _on_gpus(places):
        return HostSums()
    if reason := _why_not_by_nccl() or _why_not_on_device(sessions):
        _log.warning("sums of shards pass through the memory of the host, which is slower than NCCL: %s", reason)
        return HostSums()
    return DeviceSums()


def _on_gpus(places: Sequence[Place]) -> bool:
    return all(place.device.is_gpu for place in places)


def _run_on_device(session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
    on_device: Any = session  # a look at each run would cost more than handing a small tensor on
    found: Mapping[str, Tensor] = on_device.run_on_device(feeds, outputs)
    return found


def _why_not_on_device(sessions: Sequence[Session]) -> str:
    """Why tensors cannot stay where they are computed; empty where they can."""
    for session in sessions:
        if not isinstance(session, DeviceSession):
            return f"{type(session).__name__} does not leave its tensors on a device"
        if session.why_not_on_device:
            return session.why_not_on_device
    return ""


def _why_not_by_nccl() -> str:
    """Why NCCL cannot add; empty where it can."""
    if find_spec("torch") is None:
        return "PyTorch is not installed (pip install 'graphkiln[parallel]')"
    try:
        from torch import distributed
    except (ImportError, OSError) as error:  # a library of CUDA that is not there
        return f"PyTorch cannot be used: {error}"
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this build of PyTorch has no NCCL (pip install a build for CUDA)"
    return ""


def build_split(engine: Engine, prepared: PreparedParts, config: SessionConfig, signature: Signature) -> Session:
    """Builds the session of a split graph.

    Args:
        engine: Builds the sessions of the parts.
        prepared: What they are built from.
        config: How the whole graph would run; its `parallel` and `places` say how it is spread.
        signature: Of the whole graph: its order of tensors.

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
        handing = handing_for(config.places, [stage.session for stage in stages])
        opened.pop_all()
    return PipelineSession(stages, whole, numbers.micro_batches or 1, handing)


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
        inputs = tuple(spec.name for spec in session.signature.inputs)
        return Stage(session=session, worker=worker, inputs=inputs, outputs=_names(session.signature.outputs))

    def _build_shards(self, parts: Sequence[tuple[int, Part]], places: Sequence[Place]) -> ShardedSession:
        """All shards of a stage, in their threads."""
        with ExitStack() as own:
            workers = [Worker(place.cores, f"graphkiln-shard-{number}") for number, place in enumerate(places)]
            for worker in workers:
                own.callback(worker.close)
            segments = []
            for number, part in parts:
                sessions = []
                for shard, (place, worker) in enumerate(zip(places, workers, strict=True)):
                    sessions.append(self._build(number, shard, place, worker))
                    own.callback(sessions[-1].close)
                segments.append(
                    Segment(sessions=tuple(sessions), inputs=part.inputs, outputs=part.outputs, reduced=part.reduced)
                )
            sums = sums_for(places, [session for segment in segments for session in segment.sessions])
            own.pop_all()
        return ShardedSession(segments, workers, _stage_signature(segments), sums)

    def _build(self, part: int, shard: int, place: Place, worker: Worker) -> Session:
        """The session of one graph, built in the thread that will run it: its own threads stay on the same cores."""
        graph, compiled = graph_of(self.prepared.folder, part, shard), self.prepared.compiled.get((part, shard))
        return worker.submit(self.engine.build, graph, config_at(self.config, place), compiled).result()


def _names(specs: Sequence[TensorSpec]) -> tuple[str, ...]:
    return tuple(spec.name for spec in specs)


def _stage_signature(segments: Sequence[Segment]) -> Signature:
    """The tensors of a stage of several segments, as its first shard sees them.

    A sum has the type and shape of what is summed up.
    """
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
    """The tensors of the whole graph in its order, as the stages see them.

    Raises:
        LoweringError: No stage has one of them.
    """
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
