"""What is started for each kind of variant, and how a round is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from stories import ON_CPU, story_request

from graphkiln.story import runner as module
from graphkiln.story.request import Platform
from graphkiln.story.runner import RunningVariant, start_variant
from graphkiln.story.server import LocalServer
from graphkiln.story.throughput import Throughput
from graphkiln.story.variants import GraphSpec, Variant, final_variants, initial_variants
from graphkiln.story.workloads.base import Workload
from graphkiln.story.workloads.eager import EagerWorkload
from graphkiln.story.workloads.served import ServedWorkload
from graphkiln.story.workloads.session import SessionWorkload
from graphkiln.story.workloads.static import StaticWorkload
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess

VARIANTS = {variant.key: variant for variant in (*initial_variants(ON_CPU), *final_variants(Precision.BF16))}


@dataclass
class FakeModel:
    """A prepared model whose graphs are names."""

    request: Any = field(default_factory=story_request)
    preprocess: Preprocess = field(default_factory=Preprocess)
    derivative: str = "output:image"

    def training_graph(self) -> Path:
        return Path("training.onnx")

    def saved_graph(self, spec: GraphSpec, _: Platform) -> Path:
        return Path("models") / spec.name / spec.name / "1" / "model.onnx"


@dataclass
class Started:
    """Workers and servers that were started, and what ended."""

    workloads: list[tuple[Workload, str]] = field(default_factory=list)
    servers: list[tuple[Path, tuple[str, ...], Path | None]] = field(default_factory=list)
    events: list[str] = field(default_factory=list)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    found = Started()

    class Worker:
        pid = 11

        def __init__(self, workload: Workload, title: str) -> None:
            found.workloads.append((workload, title))

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            found.events.append("worker")

        def measure(self, jpegs: Sequence[bytes], seconds: float) -> Throughput:
            return Throughput(
                per_second=len(jpegs) / seconds, latencies_ms=(1.23456, 2.0), seconds=seconds, images=len(jpegs)
            )

    @contextmanager
    def start_server(store: Path, *, flags: tuple[str, ...], log: Path | None) -> Iterator[LocalServer]:
        found.servers.append((store, flags, log))
        yield LocalServer(http_url="http://h:1", grpc_url="grpc://h:2", pid=22)
        found.events.append("server")

    monkeypatch.setattr(module, "Worker", Worker)
    monkeypatch.setattr(module, "start_server", start_server)
    return found


def start(variant: Variant, model: Any = None) -> RunningVariant:
    with start_variant(variant, model or FakeModel(), ON_CPU) as running:
        return running


class TestLocal:
    def test_eager_pytorch_needs_no_graph(self, started: Started) -> None:
        running = start(VARIANTS["eager"])
        assert started.workloads == [
            (EagerWorkload(request=story_request(), derivative="output:image"), "eager, as found")
        ]
        assert running.pids == (11,)
        assert started.servers == []

    def test_a_static_graph_is_a_training_step_and_the_base(self, started: Started) -> None:
        start(VARIANTS["static"])
        ((workload, _),) = started.workloads
        assert workload == StaticWorkload(
            training_graph=Path("training.onnx"), forward_graph=Path("models/base/base/1/model.onnx"),
            preprocess=Preprocess(), device=CPU,
        )  # fmt: skip

    def test_a_session_runs_the_base(self, started: Started) -> None:
        start(VARIANTS["reduced"])
        ((workload, _),) = started.workloads
        assert workload == SessionWorkload(
            graph=Path("models/base/base/1/model.onnx"), preprocess=Preprocess(), device=CPU
        )
        assert started.events == ["worker"]


class TestServed:
    def test_a_server_of_the_variants_own_store(self, started: Started) -> None:
        running = start(VARIANTS["engine"])
        ((store, flags, log),) = started.servers
        assert (store, flags) == (Path("models/base"), ("--set", "base.engine=openvino"))
        assert log == story_request().folder / "engine.log"
        assert running.pids == (11, 22)
        assert started.events == ["worker", "server"]  # the one that asks ends first

    @pytest.mark.parametrize(("key", "top_k"), [("parallel", 0), ("compiled", 0), ("served", 5)])
    def test_only_the_last_step_takes_images(self, started: Started, key: str, top_k: int) -> None:
        start(VARIANTS[key], FakeModel(request=story_request(gradient=True)))
        ((workload, _),) = started.workloads
        name = {"parallel": "base"}.get(key, key)
        assert workload == ServedWorkload(url="grpc://h:2", model=name, callers=24, top_k=top_k, gradient=True)


def test_what_the_platform_cannot_do_is_not_started(started: Started) -> None:
    with pytest.raises(MeasurementError, match="cuDNN's search needs a GPU"):
        start(VARIANTS["search"])
    assert started.workloads == []
    assert started.servers == []


def test_a_round_is_what_was_measured_and_what_it_took(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 104.0])
    cpu = iter([10.0, 16.0])

    class Meter:
        def __init__(self, *pids: int) -> None:
            assert pids == (11, 22)

        def cpu_s(self) -> float:
            return next(cpu)

        def memory_mb(self) -> float:
            return 321.0

    monkeypatch.setattr(module, "ResourceMeter", Meter)
    monkeypatch.setattr(module.time, "perf_counter", lambda: next(clock))
    measured = start(VARIANTS["parallel"]).measure(3, (b"a", b"b"), 4.0)
    assert (measured.number, measured.per_second, measured.cores, measured.memory_mb) == (3, 0.5, 1.5, 321.0)
    assert measured.latencies_ms == (1.235, 2.0)  # microseconds are enough on disk
    assert len(started.workloads) == 1
