"""Session of a split graph: one engine session for each shard of each part, in threads pinned to their own cores.

A graph is cut into stages, which work on successive micro-batches (`PipelineSession`). The products of a stage may be
computed in shards, each with a part of the weights (`ShardedSession`).

On the CPU, stages and shards are threads of one process and share its memory. On GPUs, tensors stay on the device: the
engine copies the inputs of a stage from the GPU of the previous one, and NCCL adds the partial sums of shards. All
shards of a stage are threads of one process with one communicator (`torch.cuda.nccl`), so no rendezvous is needed.
GPUs: not yet run on any; built from the documentation, and tested on the CPU with everything but NCCL itself.

Source: M. Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models", 2019; NVIDIA, "NCCL User
Guide" (one process, several devices); PyTorch, `torch.cuda.nccl`; ONNX Runtime, "I/O Binding".
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

_log = logging.getLogger("graphkiln.lowering")

P = ParamSpec("P")
T = TypeVar("T")
Tensor = Any  # an array or a device tensor, as returned by `HostTransport.run`
Tensors = dict[str, Tensor]


class HostTransport:
    """Pass tensors between stages and shards in the memory of the process."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Run the session of a part in the thread of its stage or shard.

        Args:
            session: Session of the part.
            feeds: Arrays of the request, and earlier results of `run` or `add`.
            outputs: Names of the outputs.
        """
        return session.run(feeds, outputs)

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """Add tensors of equal shape in the order of the shards, and return the sum once for each shard."""
        total = partials[0].copy()
        for each in partials[1:]:
            np.add(total, each, out=total)
        return [total] * len(partials)

    def fetch(self, tensor: Tensor) -> AnyArray:
        """Return a tensor as a host array."""
        array: AnyArray = tensor
        return array


class DeviceTransport(HostTransport):
    """Keep tensors on the GPUs that computed them. Sums need PyTorch and are deterministic on the same GPUs."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `HostTransport.run`; `choose_transport` checked that the session is a `DeviceSession`."""
        on_device: Any = session  # a check at each run costs more than passing a small tensor
        found: Mapping[str, Tensor] = on_device.run_on_device(feeds, outputs)
        return found

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `HostTransport.add`.

        Raises:
            ExecutionError: NCCL failed, for example because a GPU or link was lost.
        """
        import torch  # not needed elsewhere in a server

        library: Any = torch
        tensors = [library.from_dlpack(each) for each in partials]
        totals = [library.empty_like(tensor) for tensor in tensors]
        if not tensors[0].numel():
            return totals
        try:
            library.cuda.nccl.all_reduce(tensors, totals)
            for total in totals:
                library.cuda.synchronize(total.device)  # sessions run on other streams
        except RuntimeError as error:
            raise ExecutionError(f"NCCL failed: {error}") from error
        return totals

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `HostTransport.fetch`."""
        if isinstance(tensor, np.ndarray):  # an input of the request
            return tensor
        return np.array((tensor.cpu() if hasattr(tensor, "cpu") else tensor).numpy())


def choose_transport(places: Sequence[Place], sessions: Sequence[Session], *, adds: bool) -> HostTransport:
    """Choose the transport between the stages of a pipeline or the shards of a stage.

    Args:
        places: Places of the stages or shards.
        sessions: Their sessions.
        adds: True for shards, whose partial sums are added.
    """
    if not all(place.device.is_gpu for place in places) or (len(sessions) == 1 and not adds):
        return HostTransport()
    if reason := (_why_not_by_nccl() if adds else "") or _why_not_on_device(sessions):
        what = "partial sums are added in host memory" if adds else "stages pass tensors through host memory"
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
    except (ImportError, OSError) as error:  # a CUDA library is missing
        return f"PyTorch cannot be used: {error}"
    if not distributed.is_available() or not distributed.is_nccl_available():
        return "this build of PyTorch has no NCCL (pip install a build for CUDA)"
    return ""


def build_split(engine: Engine, prepared: PreparedParts, config: SessionConfig, signature: Signature) -> Session:
    """Build the session of a split graph.

    Args:
        engine: Builds the sessions of the parts.
        prepared: Graphs or compiled parts.
        config: Configuration of the whole graph; spread by its `parallel` and `places`.
        signature: Signature of the whole graph, for the order of its tensors.

    Raises:
        GraphkilnError: The engine refuses a part, or `prepared` cannot be read; no session stays open.
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
        """Build a stage: one session in the stage's thread, or one for each shard in the shard's thread."""
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
        """Build a session in the thread that will run it, so that the engine's threads inherit its cores."""
        graph, compiled = graph_of(self.prepared.folder, part, shard), self.prepared.compiled.get((part, shard))
        return worker.submit(self.engine.build, graph, config_at(self.config, place), compiled).result()


def _stage_signature(segments: Sequence[Segment]) -> Signature:
    """Return the signature of a stage, as seen by its first shard; a sum has the type and shape of its parts."""
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
    """Return the signature of the whole graph, with the specs that the stages report."""
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
    """A thread pinned to some cores, which runs calls in order.

    The threads of a runtime that is built in it inherit the cores.

    Args:
        cores: Numbers of the cores; empty for any.
        name: Name of the thread.
    """

    def __init__(self, cores: Iterable[int] = (), name: str = "graphkiln-stage") -> None:
        self._pool = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix=name, initializer=stay_on, initargs=(tuple(cores),)
        )

    def submit(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call, to run in the caller's context (`contextvars`)."""
        return self._pool.submit(copy_context().run, partial(call, *args, **kwargs))

    def close(self) -> None:
        """Wait for the running call, and end the thread."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def results_of(futures: Iterable[Future[T]]) -> list[T]:
    """Wait for all futures, then return the results in order or raise the first error.

    None may keep running after an error, since all of them read the caller's arrays.
    """
    listed = list(futures)
    wait(listed)
    return [future.result() for future in listed]


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """A part that all shards of a stage compute in parallel, up to the next sum.

    Attributes:
        sessions: One session for each shard; owned by the `ShardedSession`.
        inputs: Names of the tensors that each shard reads.
        outputs: Names of the tensors that each shard computes.
        reduced: Outputs that are partial sums: name -> name of the sum.
    """

    sessions: tuple[Session, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reduced: Mapping[str, str] = field(default_factory=dict)


class ShardedSession(Closeable):
    """A stage in shards; see `engines.base.Session`. Deterministic: partial sums are added in a fixed order.

    Args:
        segments: The segments in order.
        workers: One thread for each shard; owned.
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
        """Compute outputs; see `engines.base.Session.run`. Always computes all of them."""
        tensors = [dict(feeds) for _ in self._workers]
        for segment in self._segments:
            self._advance(segment, tensors)
        names = outputs or [spec.name for spec in self.signature.outputs]
        return {name: self._transport.fetch(tensors[0][name]) for name in names}  # equal on all shards

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds and join the placements of all segments and shards."""
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
        """Run a segment on all shards, and add their partial sums."""
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
    """A stage; session and worker are owned by the pipeline.

    Attributes:
        session: Session of the stage.
        worker: Thread of the stage.
        inputs: Names of the tensors that it reads.
        outputs: Names of the tensors that later stages or users read.
    """

    session: Session
    worker: Worker
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class PipelineSession(Closeable):
    """A graph in stages; see `engines.base.Session`. Each stage processes micro-batches in its own thread.

    Args:
        stages: The stages in order.
        signature: Signature of the whole graph.
        micro_batches: Number of parts of a batch; 1 for graphs whose batch cannot be split.
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
        # Between two stages: one micro-batch in each of them, and the ones that wait.
        self._room = [Semaphore(WAITING + 2) for _ in self.stages[1:]]

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs; see `engines.base.Session.run`. Always computes all of them.

        Raises:
            ExecutionError: A stage failed, or the outputs of micro-batches cannot be joined.
        """
        last = [self._start(part) for part in self._cut(feeds)]
        found, fetch = results_of(last), self._transport.fetch
        return {name: _join(name, [fetch(part[name]) for part in found]) for name in outputs or self._outputs}

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds as one micro-batch, and join the placements of all stages."""
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
        """Split a batch into micro-batches (views)."""
        rows = len(next(iter(feeds.values()))) if self._micro_batches > 1 else 1
        count = min(self._micro_batches, rows)
        if count <= 1:
            return [dict(feeds)]
        ends = [rows * number // count for number in range(count + 1)]
        spans = itertools.pairwise(ends)
        return [{name: array[begin:end] for name, array in feeds.items()} for begin, end in spans]

    def _start(self, tensors: Tensors) -> Future[Tensors]:
        """Queue a micro-batch on all stages, and return the future of the last one."""
        first, *others = self.stages
        future = first.worker.submit(self._advance, 0, tensors)
        for number, stage in enumerate(others, start=1):
            future = stage.worker.submit(self._advance, number, future)
        return future

    def _advance(self, number: int, given: Tensors | Future[Tensors]) -> Tensors:
        """Run a stage on the result of the previous one, or raise its error."""
        if number < len(self._room):
            self._room[number].acquire()  # limits the memory of micro-batches that wait for the next stage
        try:
            return self._compute(number, given.result() if isinstance(given, Future) else given)
        finally:
            if number:
                self._room[number - 1].release()

    def _compute(self, number: int, tensors: Mapping[str, Tensor]) -> Tensors:
        """Run a stage, and return all tensors that users and later stages still need."""
        stage = self.stages[number]
        fed = {name: tensors[name] for name in stage.inputs}
        computed = self._transport.run(stage.session, fed, stage.outputs)
        kept = {name: tensor for name, tensor in tensors.items() if name in self._kept[number]}
        return {**kept, **computed}


def _join(name: str, parts: Sequence[AnyArray]) -> AnyArray:
    """Join the outputs of micro-batches."""
    if len(parts) == 1:
        return parts[0]
    try:
        return np.concatenate(parts)
    except ValueError as error:
        shapes = ", ".join(str(list(part.shape)) for part in parts[:3])
        raise ExecutionError(
            f"output '{name}' has the shapes {shapes} in micro-batches, which cannot be joined",
            hint="its size depends on values: use parallel: pipeline=N, micro_batches=1, which keeps batches whole",
        ) from error


def _join_placements(parts: Sequence[Placement]) -> Placement:
    """Sum the placements of parts; the precision is that of the part with the most products."""
    nodes, products = Counter[str](), Counter[KernelType]()
    for part in parts:
        nodes.update(part.nodes)
        products.update(part.products)
    largest = max(parts, key=lambda part: (sum(part.products.values()), sum(part.nodes.values())))
    elsewhere = tuple(name for part in parts for name in part.elsewhere)
    return Placement(nodes=dict(nodes), precision=largest.precision, products=dict(products), elsewhere=elsewhere)
