"""One model over two groups of cores: copies, stages and shards beside each other and beside the whole model.

Throughput is that of batches behind each other, latency that of one row alone. On paper: the same for two to eight
GPUs, from counted costs and the speeds of data sheets.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import onnx_ir
from inputs import CACHE
from measurement import SetUp, Summary, measure, ratio_of, show_progress
from precision_models import export_once, made_up

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.cores import usable_cores
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.graph.parallelism import Parallelism
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts
from graphkiln_backend.lowering.parallel.estimate import (
    Estimate,
    estimate_copies,
    estimate_pipeline,
    estimate_shards,
)
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.pipeline import PipelineSession
from graphkiln_backend.lowering.parallel.shards import ShardedSession
from graphkiln_backend.lowering.parallel.speed import NVLINK_GPU, PCIE_GPU, Speed
from graphkiln_backend.lowering.parallel.worker import Worker
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.selection import select_session
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.lowering.spreading import Spread, spread_model
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_backend.repository.version import ModelVersion

_BATCH = 32
_WIDTH, _HIDDEN = 2048, 8192
_NUMBERS = {
    "data=2": Parallelism(data=2),
    "pipeline=2": Parallelism(pipeline=2),
    "tensor=2": Parallelism(tensor=2),
}
_GPUS = (2, 4, 8)
_LINKS = {"PCIe 4.0": PCIE_GPU, "NVLink 3": NVLINK_GPU}

Run = Callable[[dict[str, AnyArray]], object]


def large_product() -> Path:
    """The graph of one MLP of a large transformer, `[batch, 2048]`, its hidden layer 8192 wide; 128 MiB of weights."""
    path = CACHE / "large_product.onnx"
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        path.write_bytes(onnx_ir.to_proto(_mlp()).SerializeToString())
    return path


def _mlp() -> onnx_ir.Model:
    random = np.random.default_rng(0)
    sizes = {"w1": (_WIDTH, _HIDDEN), "w2": (_HIDDEN, _WIDTH)}
    weights = [
        onnx_ir.Value(
            name=name,
            const_value=onnx_ir.tensor((random.normal(size=size) / size[0] ** 0.5).astype(np.float32), name=name),
        )
        for name, size in sizes.items()
    ]
    shape, kind = onnx_ir.Shape(["batch", _WIDTH]), onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    x = onnx_ir.Value(name="x", shape=shape, type=kind)
    first = onnx_ir.node("MatMul", [x, weights[0]], name="first")
    relu = onnx_ir.node("Relu", [first.outputs[0]], name="relu")
    last = onnx_ir.node("MatMul", [relu.outputs[0], weights[1]], name="last")
    first.outputs[0].name, relu.outputs[0].name = "h", "r"
    y = last.outputs[0]
    y.name, y.shape, y.type = "y", shape, kind
    graph = onnx_ir.Graph(
        [x], [y], nodes=[first, relu, last], initializers=weights, opset_imports={"": 18}, name="large_product"
    )
    return onnx_ir.Model(graph, ir_version=9)


_GRAPHS: dict[str, Callable[[], Path]] = {
    "large product": large_product,
    "resnet50": partial(export_once, "resnet50"),
    "vit_b_16": partial(export_once, "vit_b_16"),
    "bert_base": partial(export_once, "bert_base"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Built:
    """A set-up: what runs a request, how many callers keep it busy, the split, and its sessions."""

    run: Run
    callers: int
    spread: Spread | None
    sessions: Sequence[Session]


def benchmark_parallel(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Each model whole on one core and on all, in copies, in stages, in shards."""
    if usable_cores() < 2:
        raise LoweringError("two groups of cores are compared", attempts=("one core is here",))
    return [row for name, graph in _GRAPHS.items() for row in _measure_model(name, graph(), rounds, seconds)]


def _measure_model(name: str, graph: Path, rounds: int, seconds: float) -> Iterator[dict[str, object]]:
    with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder)) as cache, ExitStack() as opened:
        built = {}
        for set_up in ("1 core", "2 cores", *_NUMBERS):
            show_progress(f"{name}: building {set_up}")
            try:
                built[set_up] = _build(graph, set_up, cache, opened)
            except LoweringError as error:
                show_progress("")
                print(f"{name}, {set_up}: {error}")
        signature = read_signature(graph)
        many, one = (_feeds(signature, rows) for rows in (_BATCH, 1))
        full = measure(
            [SetUp(name=each, concurrency=b.callers, request=partial(b.run, many)) for each, b in built.items()],
            rounds,
            seconds,
        )
        alone = measure(
            [SetUp(name=each, concurrency=1, request=partial(b.run, one)) for each, b in built.items()], rounds, seconds
        )
    yield from (_row(name, each, built[each], full, alone) for each in built)


def _feeds(signature: Signature, rows: int) -> dict[str, AnyArray]:
    """Images or tokens; for the product alone, normal numbers."""
    random = np.random.default_rng(1)
    if any(len(spec.shape) == 2 and spec.dtype is DType.FP32 for spec in signature.inputs):
        return {"x": random.normal(size=(rows, _WIDTH)).astype(np.float32)}
    return made_up(signature, rows, random)


def _row(
    model: str, set_up: str, built: _Built, full: dict[str, Summary], alone: dict[str, Summary]
) -> dict[str, object]:
    split = built.spread.split if built.spread else None
    share = max(stage.weight_bytes for stage in split.stages) / split.whole.weight_bytes if split else 1.0
    copies = ratio_of(full[set_up].rates, full["data=2"].rates)
    return {
        "model": model,
        "set-up": set_up,
        "samples/s": round(full[set_up].per_second * _BATCH, 1),
        "to data=2": copies.median,
        "spread": copies.spread,
        "ms alone": round(alone[set_up].p50_ms, 2),
        "to 1 core": ratio_of(alone["1 core"].rates, alone[set_up].rates).median,
        "weights a device": f"{share:.0%}",
        "sums": _sum_share(built.sessions),
    }


def _sum_share(sessions: Sequence[Session]) -> str:
    """Of all that shards ran, the share that adding up took."""
    pipelines = (session for session in sessions if isinstance(session, PipelineSession))
    stages = [stage.session for pipeline in pipelines for stage in pipeline.stages]
    sharded = [session for session in stages if isinstance(session, ShardedSession)]
    run_s = sum(session.run_s for session in sharded)
    return f"{sum(session.reduce_s for session in sharded) / run_s:.1%}" if run_s else "-"


def _build(graph: Path, set_up: str, cache: ArtifactCache, opened: ExitStack) -> _Built:
    numbers = _NUMBERS.get(set_up)
    if numbers and not numbers.splits:
        return _copies(graph, numbers, cache, opened)
    planned = _plan(graph, numbers, cores=1 if set_up == "1 core" else 2)
    session = opened.enter_context(_prove(graph, planned, cache).session)
    return _Built(run=session.run, callers=1, spread=planned.spread, sessions=[session])


def _copies(graph: Path, numbers: Parallelism, cache: ArtifactCache, opened: ExitStack) -> _Built:
    """Whole sessions in threads on cores of their own; a caller takes the next free one."""
    free: SimpleQueue[tuple[Worker, Session]] = SimpleQueue()
    sessions = []
    for instance in range(numbers.data):
        planned = _plan(graph, numbers, cores=2, instances=numbers.data, instance=instance)
        worker = opened.enter_context(Worker(planned.resources.places[0].cores))
        sessions.append(opened.enter_context(worker.submit(_prove, graph, planned, cache).result().session))
        free.put((worker, sessions[-1]))

    def run(feeds: dict[str, AnyArray]) -> object:
        worker, session = free.get()
        try:
            return worker.submit(session.run, feeds).result()
        finally:
            free.put((worker, session))

    return _Built(run=run, callers=numbers.data, spread=None, sessions=sessions)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Planned:
    settings: Settings
    resources: Resources
    spread: Spread | None


def _plan(graph: Path, numbers: Parallelism | None, *, cores: int, instances: int = 1, instance: int = 0) -> _Planned:
    version = ModelVersion(graph_path=graph, manifest=None, golden=None)
    resources = Resources(device=CPU, cores=cores, probe=probe, instances=instances, instance=instance)
    settings = Settings(parallel=numbers)
    spread = None
    if numbers:
        spread = spread_model(numbers, settings, version, resources, saved=Precision.FP32, largest_batch=_BATCH)
        settings, resources = spread.apply(settings, resources)
    return _Planned(settings=settings, resources=resources, spread=spread)


def _prove(graph: Path, planned: _Planned, cache: ArtifactCache) -> ProvenSession:
    version = ModelVersion(graph_path=graph, manifest=None, golden=None)
    artifacts = Artifacts(version, Precision.FP32, cache)
    configs = plan(planned.settings, planned.resources, largest_batch=_BATCH)
    return select_session(artifacts, configs, Requirements(batch_sizes=(1, _BATCH)))


def benchmark_devices(_: int, __: float) -> list[dict[str, object]]:
    """On paper: the same models over two to eight GPUs."""
    rows = []
    for name, graph in _GRAPHS.items():
        show_progress(f"{name}: counting")
        path = graph()
        for link, speed in _LINKS.items():
            whole = _costs(path, 1)
            one = estimate_copies(whole, 1, speed, _BATCH)
            rows.append(_paper_row(name, link, "whole", 1, one, one))
            for count in _GPUS:
                rows.append(_paper_row(name, link, "data", count, estimate_copies(whole, count, speed, _BATCH), one))
                rows += [
                    _paper_row(name, link, way, count, found, one)
                    for way, estimate in _ways(path, count, speed)
                    if (found := _if_possible(estimate))
                ]
    show_progress("")
    return rows


def _ways(path: Path, count: int, speed: Speed) -> Iterator[tuple[str, Callable[[], Estimate]]]:
    yield "pipeline", lambda: estimate_pipeline(_costs(path, 1), count, speed, _BATCH)
    yield "tensor", lambda: estimate_shards(_costs(path, 1), _costs(path, count), count, speed, _BATCH)


@cache
def _costs(path: Path, shards: int) -> GraphCosts:
    """Counted once: the weights of a graph are read for it."""
    return count_costs(path, shards)


def _if_possible(estimate: Callable[[], Estimate]) -> Estimate | None:
    """None where the graph cannot be split so."""
    try:
        return estimate()
    except LoweringError:
        return None


def _paper_row(  # noqa: PLR0917 - the columns
    model: str, link: str, way: str, count: int, found: Estimate, one: Estimate
) -> dict[str, object]:
    return {
        "model": model,
        "link": link,
        "GPUs": count,
        "split": way,
        "samples/s": round(found.rate),
        "to one GPU": round(found.rate / one.rate, 2),
        "ms a batch": round(found.latency_s * 1e3, 2),
        "weights a device": f"{found.weight_share:.0%}",
        "sums": f"{found.sum_share:.0%}",
    }
