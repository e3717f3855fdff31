"""Lowering beside ONNX Runtime in fp32: throughput of each precision, first and cached load, what a session adds."""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np
from inputs import CACHE, exported_graph
from measurement import SetUp, measure

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.base import Session
from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.onnxruntime.quantization import Quantization, quantize
from graphkiln_backend.engines.registry import load_engine, probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.lowering.acceptance import Requirements
from graphkiln_backend.lowering.artifacts import Artifacts, saved_precision
from graphkiln_backend.lowering.plan import Resources, plan
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.lowering.selection import select_session
from graphkiln_backend.lowering.settings import Settings
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.system.resources import usable_cores

_BATCH = 8
_IMAGE = (3, 224, 224)


def benchmark_lowering(rounds: int, seconds: float) -> list[dict[str, object]]:
    """ResNet-101 in every precision that this CPU computes in, at batch 1 and 8."""
    graph = _version(exported_graph("resnet101"))
    int8 = _version(_quantized("resnet101"))
    with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder)) as cache:
        sessions = {
            "onnxruntime fp32": _prove(graph, Settings(), cache),
            "openvino fp32": _prove(graph, Settings(engine="openvino"), cache),
            "auto, bf16 requested": _prove(graph, Settings(engine="auto", precision=Precision.BF16), cache),
            "onnxruntime int8": _prove(int8, Settings(), cache),
            "auto, int8 saved": _prove(int8, Settings(engine="auto"), cache),
        }
        rows: list[dict[str, object]] = []
        for batch in (1, _BATCH):
            feeds = {"INPUT_0": np.random.default_rng(1).normal(size=(batch, *_IMAGE)).astype(np.float32)}
            set_ups = [
                SetUp(name=name, concurrency=1, request=partial(proven.session.run, feeds))
                for name, proven in sessions.items()
            ]
            summaries = measure(set_ups, rounds, seconds)
            reference = summaries["onnxruntime fp32"]
            rows += [
                {
                    "set-up": name,
                    "engine": sessions[name].config.engine,
                    "batch": batch,
                    "images/s": round(summary.per_second * batch, 1),
                    "ratio": round(summary.per_second / reference.per_second, 2),
                    "spread": summary.spread_beside(reference),
                    "products": _products(sessions[name]),
                }
                for name, summary in summaries.items()
            ]
        for proven in sessions.values():
            proven.session.close()
    return rows


def benchmark_lowered_load(rounds: int, _: float) -> list[dict[str, object]]:
    """Loading ResNet-101: the first time, and from the cache. Every load is a new cache object, as in a new process."""
    graph = exported_graph("resnet101")
    rows: list[dict[str, object]] = []
    for name, settings in {
        "bf16": Settings(engine="auto", precision=Precision.BF16),
        "openvino fp32": Settings(engine="openvino"),
        "onnxruntime fp32": Settings(),
    }.items():
        first: list[float] = []
        cached: list[float] = []
        for _number in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                for seconds in (first, cached):
                    begun = time.perf_counter()
                    with ArtifactCache(Path(folder)) as cache:
                        session = _loaded(graph, settings, cache)
                        seconds.append(time.perf_counter() - begun)
                        session.close()
        medians = statistics.median(first), statistics.median(cached)
        rows.append(
            {
                "model": "resnet101",
                "set-up": name,
                "first s": round(medians[0], 2),
                "cached s": round(medians[1], 2),
                "ratio": round(medians[0] / medians[1], 1),
            }
        )
    return rows


def benchmark_session(rounds: int, seconds: float) -> list[dict[str, object]]:
    """What a session of ours adds to the runtime's own call, and what the self-test of ResNet-50 costs."""
    graph = exported_graph("resnet50")
    feeds = {"INPUT_0": np.random.default_rng(1).normal(size=(1, *_IMAGE)).astype(np.float32)}
    (config,) = plan(Settings(), _resources()).candidates
    with OnnxRuntimeEngine().build(graph, config) as session:
        raw = session._session  # noqa: SLF001 - the same session, called without ours
        set_ups = [
            SetUp(name="raw", concurrency=1, request=lambda: raw.run(["OUTPUT_0"], feeds)),
            SetUp(name="session", concurrency=1, request=partial(session.run, feeds)),
        ]
        summaries = measure(set_ups, rounds, seconds)
    return [
        {
            "model": "resnet50",
            "raw ms": round(summaries["raw"].p50_ms, 3),
            "session ms": round(summaries["session"].p50_ms, 3),
            "ratio": round(summaries["session"].p50_ms / summaries["raw"].p50_ms, 4),
            "self-test s": round(_self_test_s(graph, rounds=3), 2),
        }
    ]


def _self_test_s(graph: Path, rounds: int) -> float:
    """Seconds that a load with self-test takes longer than one without, the median of some rounds."""
    version = _version(graph, golden=True)
    differences = []
    for _ in range(rounds):
        seconds = []
        for self_test in (True, False):
            with tempfile.TemporaryDirectory() as folder, ArtifactCache(Path(folder), lasting=False) as cache:
                begun = time.perf_counter()
                _prove(version, Settings(self_test=self_test), cache).session.close()
                seconds.append(time.perf_counter() - begun)
        differences.append(seconds[0] - seconds[1])
    return statistics.median(differences)


def _products(proven: ProvenSession) -> str:
    """What convolutions and matrix products ran in, as read back."""
    counts = proven.placement.products if proven.placement else {}
    return ", ".join(f"{count} {precision}" for precision, count in counts.items())


def _resources() -> Resources:
    return Resources(device=CPU, cores=usable_cores(), probe=probe)


def _version(graph: Path, *, golden: bool = False) -> ModelVersion:
    if not golden:
        return ModelVersion(graph_path=graph, manifest=None, golden=None)
    feeds = {"INPUT_0": np.random.default_rng(2).normal(size=(4, *_IMAGE)).astype(np.float32)}
    with OnnxRuntimeEngine().build_reference(graph) as session:
        answers = session.run(feeds)
    samples = GoldenSamples(inputs=feeds, source_outputs=answers, graph_outputs=answers)
    return ModelVersion(graph_path=graph, manifest=None, golden=samples)


def _prove(version: ModelVersion, settings: Settings, cache: ArtifactCache) -> ProvenSession:
    saved = saved_precision(version)
    artifacts = Artifacts(version, saved, cache)
    planned = plan(settings, _resources(), saved=saved, largest_batch=_BATCH)
    requirements = Requirements(batch_sizes=(1, _BATCH), self_test=settings.self_test)
    return select_session(artifacts, planned, requirements)


def _loaded(graph: Path, settings: Settings, cache: ArtifactCache) -> Session:
    """A session, neither proven nor warmed: that takes equally long both times."""
    version = _version(graph)
    config = plan(settings, _resources(), largest_batch=_BATCH).candidates[0]  # the first that `auto` would try
    return Artifacts(version, Precision.FP32, cache).build_session(load_engine(config.engine), config)


def _quantized(architecture: str) -> Path:
    """The int8 graph of an architecture, calibrated on noise: right for speed, meaningless for answers."""
    target = CACHE / f"{architecture}-int8.onnx"
    if not target.exists():
        print(f"quantizing {architecture} (once)", file=sys.stderr)
        samples = np.random.default_rng(0).normal(size=(8, *_IMAGE)).astype(np.float32)
        quantize(exported_graph(architecture), {"INPUT_0": samples}, Quantization(batch_size=4), target)
    return target
