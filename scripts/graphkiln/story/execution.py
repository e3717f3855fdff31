"""Executes a variant: starts its server where it has one, opens its workload in a process, measures it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from graphkiln.story.commands import setting_flags
from graphkiln.story.preparation import PreparedModel
from graphkiln.story.request import Platform
from graphkiln.story.results import Round
from graphkiln.story.server import start_server
from graphkiln.story.variants import BASE_GRAPH, TOP_K, Variant
from graphkiln.story.worker import ResourceMeter, Worker
from graphkiln.story.workloads.base import Workload
from graphkiln.story.workloads.eager import EagerWorkload
from graphkiln.story.workloads.served import ServedWorkload
from graphkiln.story.workloads.session import SessionWorkload
from graphkiln.story.workloads.static import StaticWorkload
from graphkiln_backend.graph.errors import MeasurementError


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningVariant:
    """A variant whose process (and server) runs.

    Attributes:
        variant: The variant.
        worker: Its process.
        pids: Of the process and, where there is one, of the server.
    """

    variant: Variant
    worker: Worker
    pids: tuple[int, ...]

    def measure(self, number: int, jpegs: Sequence[bytes], seconds: float) -> Round:
        """Measures one round.

        Raises:
            MeasurementError: The workload failed, or its process ended.
        """
        meter = ResourceMeter(*self.pids)
        cpu_s, begun = meter.cpu_s(), time.perf_counter()
        throughput = self.worker.measure(jpegs, seconds)
        cores = (meter.cpu_s() - cpu_s) / (time.perf_counter() - begun)
        return Round(
            number=number,
            per_second=throughput.per_second,
            latencies_ms=tuple(round(latency, 3) for latency in throughput.latencies_ms),
            cores=cores,
            memory_mb=meter.memory_mb(),
        )


@contextmanager
def start_variant(variant: Variant, model: PreparedModel, platform: Platform) -> Iterator[RunningVariant]:
    """Starts all that a variant needs, and stops it when the context is left.

    Raises:
        MeasurementError: The platform cannot execute it, or it cannot be started.
        ConversionError: Its graph cannot be converted.
        VerificationError: The outputs of its graph changed.
    """
    if variant.unavailable:
        raise MeasurementError(variant.unavailable)
    if variant.is_served:
        with _served(variant, model, platform) as (workload, server_pid), Worker(workload, variant.title) as worker:
            yield RunningVariant(variant=variant, worker=worker, pids=(worker.pid, server_pid))
    else:
        with Worker(_local_workload(variant, model, platform), variant.title) as worker:
            yield RunningVariant(variant=variant, worker=worker, pids=(worker.pid,))


def _local_workload(variant: Variant, model: PreparedModel, platform: Platform) -> Workload:
    if variant.kind == "eager":
        return EagerWorkload(request=model.request, derivative=model.derivative)
    graph, device = model.saved_graph(variant.graph or BASE_GRAPH, platform), platform.device
    if variant.kind == "static":
        training_graph = model.training_graph()
        return StaticWorkload(
            training_graph=training_graph, forward_graph=graph, preprocess=model.preprocess, device=device
        )
    return SessionWorkload(graph=graph, preprocess=model.preprocess, device=device)


@contextmanager
def _served(variant: Variant, model: PreparedModel, platform: Platform) -> Iterator[tuple[Workload, int]]:
    """The workload of a server that runs, and the server's process id."""
    request, spec = model.request, variant.graph or BASE_GRAPH
    store = model.saved_graph(spec, platform).parents[2]
    log = request.folder / f"{variant.key}.log"
    with start_server(store, flags=setting_flags(spec.name, variant), log=log) as server:
        workload = ServedWorkload(
            url=server.grpc_url,
            model=spec.name,
            callers=platform.callers,
            top_k=TOP_K if variant.kind == "images" else 0,
            gradient=request.gradient,
        )
        yield workload, server.pid
