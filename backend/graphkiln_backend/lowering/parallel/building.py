"""Builds the session of a split graph: an engine's session for each shard of each part, in a thread on its cores."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

from graphkiln_backend.engines.base import Engine, Session, SessionConfig
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.parallelism import Place
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.device_sums import handing_for, sums_for
from graphkiln_backend.lowering.parallel.part_artifacts import PreparedParts, config_at
from graphkiln_backend.lowering.parallel.parts import Part, Parts, graph_of, read_parts
from graphkiln_backend.lowering.parallel.pipeline import PipelineSession, Stage
from graphkiln_backend.lowering.parallel.shards import Segment, ShardedSession
from graphkiln_backend.lowering.parallel.worker import Worker


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
