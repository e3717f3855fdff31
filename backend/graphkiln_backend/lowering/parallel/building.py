"""Builds the session of a split graph: an engine's session for each shard of each part, in a thread on its cores."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import numpy as np

from graphkiln_backend.engines.base import DeviceSession, Engine, Session, SessionConfig
from graphkiln_backend.graph.device import Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError, LoweringError
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.part_artifacts import PreparedParts, config_at
from graphkiln_backend.lowering.parallel.parts import Part, Parts, graph_of, read_parts
from graphkiln_backend.lowering.parallel.pipeline import PipelineSession, Stage
from graphkiln_backend.lowering.parallel.shards import Segment, ShardedSession
from graphkiln_backend.lowering.parallel.sums import Handing, HostSums, Sums, Tensor
from graphkiln_backend.lowering.parallel.worker import Worker

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
