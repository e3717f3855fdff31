"""Interface of engines.

An engine checks whether it can run on a device (`probe`), and builds a session from a graph file (`build`). A session
computes outputs (`run`), and reports which kernels actually ran (`placement`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from graphkiln_backend.graph.device import Device, Parallelism, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature

# True in a thread other than the one that serves requests (never concurrently with it): state that a runtime keeps by
# thread, such as CUDA graphs, is then not used.
PLAIN_RUNS: ContextVar[bool] = ContextVar("PLAIN_RUNS", default=False)
GraphLevel = Literal["all", "extended", "basic", "off"]  # how far a runtime may rewrite a graph while it loads it
# Note for the user, followed by the error.
REWRITES_OFF = "ONNX Runtime's own rewrites break the graph, so they are off (optimization.graph.level: 2)"
# Arithmetic type of a kernel: a precision, or a type without one.
KernelType = Precision | Literal["fp64", "integer", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionTuning:
    """Options of a runtime that do not change outputs.

    The `str` of this class is part of existing cache keys: keep its name and fields.

    Attributes:
        graph_level: Graph optimizations at load.
        parallel: Whether independent operators run in parallel.
        inter_threads: Threads for parallel operators; 0 for the runtime's default.
        memory_arena: Whether to keep freed memory for the next run.
        memory_pattern: Whether to plan allocations from earlier runs of the same shapes. ONNX Runtime (1.32) then keeps
            a block of memory for each batch size: with batches of 1 and 8, 15 of 43 MB for MobileNetV3-small and 65 of
            245 MB for ResNet-50, and runs are not faster.
        arena_shrinkage: Devices whose arenas shrink after each run, such as `cpu:0`; empty for none.
        config_entries: The runtime's own `session.*` entries.
    """

    graph_level: GraphLevel = "all"
    parallel: bool = False
    inter_threads: int = 0
    memory_arena: bool = True
    memory_pattern: bool = False
    arena_shrinkage: str = ""
    config_entries: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionConfig:
    """Configuration of a session.

    Attributes:
        engine: Name of the engine.
        device: Device of the session.
        threads: Threads inside one operator.
        spin: Whether idle threads spin (low latency) or sleep (shared cores).
        reason: Reason why the plan has this configuration.
        precision: Required precision of products; None leaves it to the graph and checks nothing.
        layout: `nchw`, `nhwc`, or empty for the engine's own choice.
        conv_search: cuDNN's search for kernels, or empty for its default.
        streams: Parts of a batch that are computed in parallel.
        largest_batch: Largest batch of requests.
        tuning: Other session options.
        shared_folder: Folder for files that instances of a model share, or None for a single instance.
        options: Options by the engine's own names, from config.pbtxt.
        op_libraries: Paths or names of custom operator libraries for the dynamic loader.
        providers: Execution providers of other packages for ONNX Runtime in order, as `NAME` or `NAME:DEVICE`; `CPU` at
            the end lets the CPU compute products that they leave.
        parallel: Spread of the graph over devices, or None.
        places: Place of each shard of each stage, stage by stage; empty if nothing is pinned.
        cuts: Position of the first node of each stage except the first.
    """

    engine: str
    device: Device
    threads: int
    spin: bool
    reason: str
    precision: Precision | None = None
    layout: str = ""
    conv_search: str = ""
    streams: int = 1
    largest_batch: int = 1
    tuning: SessionTuning = field(default_factory=SessionTuning)
    shared_folder: Path | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    op_libraries: tuple[str, ...] = ()
    providers: tuple[str, ...] = ()
    parallel: Parallelism | None = None
    places: tuple[Place, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def splits(self) -> bool:
        """True if the graph is cut into stages or shards."""
        return self.parallel is not None and self.parallel.splits

    @property
    def runtime(self) -> str:
        """The engine with its providers of other packages, for people."""
        return f"{self.engine} with {', '.join(self.providers)}" if self.providers else self.engine

    def without_rewrites(self) -> Self:
        """Return a configuration in which ONNX Runtime runs the graph as it is."""
        return replace(self, tuning=replace(self.tuning, graph_level="off"))

    def __str__(self) -> str:
        spread = f" with {self.parallel}" if self.parallel else ""
        return f"{self.runtime} on {self.device}" + (f" in {self.precision}" if self.precision else "") + spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Result of a probe; `reason` explains why a device is not supported."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Kernels that ran, read back from the runtime.

    Attributes:
        nodes: Execution provider or device -> number of nodes that it executed.
        precision: Precision of most of the arithmetic.
        products: Precision -> number of executed convolutions and matrix products.
        elsewhere: Names of products that ran on another device than the configured one.
    """

    nodes: dict[str, int]
    precision: KernelType
    products: dict[KernelType, int] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()

    def __str__(self) -> str:
        nodes = ", ".join(f"{count} nodes on {executor}" for executor, count in self.nodes.items())
        products = ", ".join(f"{count} in {precision}" for precision, count in self.products.items())
        return f"{nodes}; products: {products or 'none'}"


class Computation(Protocol):
    """A graph that can be computed: by a session, or by a server."""

    @property
    def signature(self) -> Signature:
        """Inputs and outputs as reported by the runtime."""
        ...

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs (all when None).

        Args:
            feeds: All inputs by name, validated by the caller (`Signature.check`). Neither modified nor kept.
            outputs: Names of the outputs to compute.

        Returns:
            New arrays by output name, in the requested order.

        Raises:
            SignatureError: The runtime refuses the feeds.
            ExecutionError: The runtime failed.
        """
        ...


class Session(Computation, Protocol):
    """A graph that is ready to run. Not thread-safe: one caller at a time."""

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds once and read back the kernels. May be called once, before serving."""
        ...

    def close(self) -> None:
        """Free the runtime's memory."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class DeviceTensor(Protocol):
    """A device tensor that libraries exchange without a copy (DLPack)."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


@runtime_checkable
class DeviceSession(Session, Protocol):
    """A session that can leave its outputs on the device for another session."""

    @property
    def why_not_on_device(self) -> str:
        """Reason why this session cannot, or empty."""
        ...

    def run_on_device(
        self, feeds: Mapping[str, AnyArray | DeviceTensor], outputs: Sequence[str]
    ) -> Mapping[str, DeviceTensor]:
        """Compute outputs that stay on the device; they are complete when this returns.

        Args:
            feeds: All inputs by name: arrays, or tensors on this device.
            outputs: Names of the outputs.

        Raises:
            SignatureError: The runtime refuses the feeds.
            ExecutionError: The runtime failed.
        """
        ...


@runtime_checkable
class TimedSession(Session, Protocol):
    """A session that can time each node."""

    def time_nodes(self, feeds: Mapping[str, AnyArray], runs: int) -> dict[str, float]:
        """Run the feeds several times, and return the median seconds of each node by the runtime's name.

        Args:
            feeds: All inputs by name.
            runs: Number of runs.

        Raises:
            GraphkilnError: As `run`.
        """
        ...


@runtime_checkable
class NotedSession(Session, Protocol):
    """A session that was not built as its configuration says.

    Attributes:
        notes: What differs and why, for the user.
    """

    notes: tuple[str, ...]


class Engine(Protocol):
    """A runtime."""

    def probe(self, device: Device) -> Support:
        """Check whether this engine can run on the device, without building anything."""
        ...

    def identity(self, config: SessionConfig) -> Mapping[str, str]:
        """Return the cache key of a compiled artifact, without the graph: versions, options, shapes.

        Empty if compiled artifacts of this configuration are not worth caching. Names and values are part of existing
        caches.
        """
        ...

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        """Write a compiled artifact for `build` into an empty folder.

        Raises:
            LoweringError: The runtime refuses the graph.
        """
        ...

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> Session:
        """Load a graph file.

        Args:
            graph_path: The graph.
            config: How to run it.
            compiled: Folder of `compile` for the same graph and configuration, or None.

        Raises:
            EngineUnavailable: The runtime cannot run here.
            LoweringError: The runtime refuses the graph.
        """
        ...
