"""Fake engines, and a version for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
from lowered import write_graph

from graphkiln_backend.engines.base import Placement, Session, SessionConfig, Support
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.repository.version import ModelVersion
from graphkiln_backend.system.closing import Closeable

SIGNATURE = Signature(
    inputs=(TensorSpec(name="x", dtype=DType.FP32, shape=("batch", 3)),),
    outputs=(TensorSpec(name="y", dtype=DType.FP32, shape=("batch", 3)),),
)


class FakeSession(Closeable):
    """Doubles its input, or multiplies it by another factor."""

    def __init__(self, engine: FakeEngine, config: SessionConfig, compiled: Path | None) -> None:
        self.engine = engine
        self.config = config
        self.compiled = compiled
        self.signature = engine.signature
        self.batches: list[int] = []
        self.placements = 0
        self.closed = 0

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        assert not self.closed
        if self.engine.run_error:
            raise self.engine.run_error
        (x,) = feeds.values()
        self.engine.clock.now_s += self.engine.run_s
        self.batches.append(len(x))
        names = [spec.name for spec in self.signature.outputs]
        return {name: x * np.float32(self.engine.factor) for name in outputs or names}

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        if self.engine.run_error:
            raise self.engine.run_error
        assert feeds
        self.placements += 1
        return self.engine.placement

    def close(self) -> None:
        self.closed += 1


@dataclass
class FakeClock:
    """Goes on when a session runs."""

    now_s: float = 0.0

    def perf_counter(self) -> float:
        return self.now_s

    def process_time(self) -> float:
        return 0.0

    def sleep(self, seconds: float) -> None: ...


@dataclass(kw_only=True)
class FakeEngine:
    """An engine.

    Attributes:
        name: In the registry.
        support: Result of `probe`.
        build_error: Raised by `build`.
        run_error: Raised by the sessions.
        factor: What the sessions multiply by; 2 is right.
        run_s: Seconds that a run takes, by the clock.
        facts: What its compiled artifacts depend on.
        sessions: What it has built.
        graphs: What from.
    """

    name: str
    clock: FakeClock = field(default_factory=FakeClock)
    support: Support = field(default_factory=lambda: Support(ok=True))
    build_error: BaseException | None = None
    run_error: Exception | None = None
    factor: float = 2.0
    run_s: float = 1.0
    facts: dict[str, str] = field(default_factory=dict)
    signature: Signature = SIGNATURE
    placement: Placement = field(
        default_factory=lambda: Placement(nodes={"fake": 1}, precision=Precision.FP32, products={Precision.FP32: 1})
    )
    sessions: list[FakeSession] = field(default_factory=list)
    graphs: list[Path] = field(default_factory=list)

    @property
    def config(self) -> SessionConfig:
        """A configuration for it."""
        return SessionConfig(engine=self.name, device=CPU, threads=1, spin=False, reason="test")

    def probe(self, device: Device) -> Support:
        assert device == CPU
        return self.support

    def identity(self, config: SessionConfig) -> Mapping[str, str]:
        assert config.engine == self.name
        return self.facts

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        (folder / "blob").write_bytes(f"{config} ".encode() + graph_path.read_bytes())

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> Session:
        if self.build_error:
            raise self.build_error
        self.graphs.append(graph_path)
        self.sessions.append(FakeSession(self, config, compiled))
        return self.sessions[-1]


AddEngine = Callable[..., FakeEngine]


@pytest.fixture
def add_engine(monkeypatch: pytest.MonkeyPatch) -> AddEngine:
    """Registers an engine; there are no others."""
    engines: dict[str, FakeEngine] = {}
    clock = FakeClock()

    def load(name: str) -> FakeEngine:
        if name not in engines:
            raise EngineUnavailable(f"unknown engine '{name}'")
        return engines[name]

    def add(name: str, **options: object) -> FakeEngine:
        engines[name] = FakeEngine(name=name, clock=clock, **options)  # type: ignore[arg-type]
        return engines[name]

    for module in ("artifacts", "proven_session"):
        monkeypatch.setattr(f"graphkiln_backend.lowering.{module}.load_engine", load)
    monkeypatch.setattr("graphkiln_backend.engines.timing.time", clock)
    return add


@pytest.fixture
def golden() -> GoldenSamples:
    x = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)
    return GoldenSamples(inputs={"x": x}, source_outputs={"y": x * 2}, graph_outputs={"y": x * 2})


@pytest.fixture
def version(tmp_path: Path, golden: GoldenSamples) -> ModelVersion:
    """A version whose graph only the engines above can run."""
    path = tmp_path / "store" / "m" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    write_graph(path, "y")
    return ModelVersion(graph_path=path, manifest=None, golden=golden)


@pytest.fixture
def bare(version: ModelVersion) -> ModelVersion:
    """The same without golden samples."""
    return replace(version, golden=None)
