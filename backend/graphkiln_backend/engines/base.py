"""The interface of engines.

An engine checks whether it can run on a device (`probe`), then turns a graph file into a session (`build`). A session
computes outputs (`run`), and reports what really ran where (`placement`), so that no configuration has to be believed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, Self, runtime_checkable

from graphkiln_backend.graph.device import Device, Parallelism, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature

# Set where a session is run by another thread than the one that serves its requests, never beside it: what a runtime
# keeps by thread, such as CUDA graphs, is then left alone.
PLAIN_RUNS: ContextVar[bool] = ContextVar("PLAIN_RUNS", default=False)
GraphLevel = Literal["all", "extended", "basic", "off"]  # how far a runtime may rewrite a graph while it loads it
# What a kernel computes in: a precision, or what no precision names.
KernelType = Precision | Literal["fp64", "integer", "unknown"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionTuning:
    """Options of a runtime; none of them changes an output.

    The text of this class is part of the keys of caches that exist: its name and its fields stay as they are.

    Attributes:
        graph_level: Graph optimizations at load.
        parallel: Whether independent operators run at the same time.
        inter_threads: Threads for that; 0 for the runtime's default.
        memory_arena: Whether freed memory is kept for the next run.
        memory_pattern: Whether allocations are planned from earlier runs of the same shapes. ONNX Runtime
            (1.32) then keeps a block of memory for each batch size: with batches of 1 and 8, 15 of 43 MB for
            MobileNetV3-small and 65 of 245 MB for ResNet-50, and runs are not faster.
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
    """Everything that an engine needs to know beside the graph.

    Attributes:
        engine: Name in the registry.
        device: Device that it runs on.
        threads: Threads inside one operator.
        spin: Whether idle threads spin (low latency) or sleep (cores are shared).
        reason: Why the plan holds this configuration.
        precision: Precision that products must be computed in; None leaves it to the graph and proves nothing.
        layout: `nchw`, `nhwc`, or empty for the engine's own choice.
        conv_search: cuDNN's search for kernels, or empty for its default.
        streams: Parts of a batch that are computed in parallel.
        largest_batch: The largest batch that will be requested.
        tuning: The rest of the session's options.
        shared_folder: Folder for what instances of a model can share, or None for an only instance.
        options: Options by the engine's own names, as config.pbtxt has them.
        op_libraries: Libraries of custom operators, as the system's loader takes them.
        parallel: Spread of the graph over devices; None for a graph that runs whole on one.
        places: Place of each shard of each stage, stage by stage; empty where nothing is pinned.
        cuts: Positions of the first node of each stage but the first.
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
    parallel: Parallelism | None = None
    places: tuple[Place, ...] = ()
    cuts: tuple[int, ...] = ()

    @property
    def splits(self) -> bool:
        """True for a graph that is cut into stages or shards."""
        return self.parallel is not None and self.parallel.splits

    def __str__(self) -> str:
        spread = f" with {self.parallel}" if self.parallel else ""
        return f"{self.engine} on {self.device}" + (f" in {self.precision}" if self.precision else "") + spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Support:
    """Support of a device by an engine, or the reason why there is none."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Kernels that really ran, read back from the runtime.

    Attributes:
        nodes: Name of an execution provider or the like -> number of nodes that it executed.
        precision: Precision of most of the arithmetic.
        products: Precision -> number of executed convolutions and matrix products.
        elsewhere: Products that ran on another device than the configuration's, by name.
    """

    nodes: dict[str, int]
    precision: KernelType
    products: dict[KernelType, int] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()

    def __str__(self) -> str:
        nodes = ", ".join(f"{count} nodes on {executor}" for executor, count in self.nodes.items())
        products = ", ".join(f"{count} in {precision}" for precision, count in self.products.items())
        return f"{nodes}; products: {products or 'none'}"


class Session(Protocol):
    """A graph that is ready to run. Not thread-safe: one caller at a time."""

    @property
    def signature(self) -> Signature:
        """Inputs and outputs as the runtime sees them."""
        ...

    def run(self, feeds: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Compute outputs (all when None).

        Args:
            feeds: Every input by name; validated by the caller (`Signature.check`). Not changed, not kept.
            outputs: Names of the outputs to compute.

        Returns:
            New arrays by output name, in the requested order.

        Raises:
            SignatureError: The runtime refuses the feeds.
            ExecutionError: The runtime failed.
        """
        ...

    def placement(self, feeds: Mapping[str, AnyArray]) -> Placement:
        """Run the feeds once and read back what ran where. May be called once, before serving."""
        ...

    def close(self) -> None:
        """Free the runtime's memory."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class DeviceTensor(Protocol):
    """A tensor on a device, as libraries hand them to each other without a copy (DLPack)."""

    def __dlpack__(self, *, stream: Any = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


@runtime_checkable
class DeviceSession(Session, Protocol):
    """A session that can leave its outputs on the device, for another one to read them there."""

    @property
    def why_not_on_device(self) -> str:
        """Reason why this one cannot; empty where it can."""
        ...

    def run_on_device(
        self, feeds: Mapping[str, AnyArray | DeviceTensor], outputs: Sequence[str]
    ) -> Mapping[str, DeviceTensor]:
        """Compute outputs, which stay on the device; they are there when this returns.

        Args:
            feeds: Every input by name: arrays, and tensors on this device.
            outputs: Names.

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
            feeds: Every input by name.
            runs: Number of runs.

        Raises:
            GraphkilnError: As `run`.
        """
        ...


class Engine(Protocol):
    """A runtime."""

    def probe(self, device: Device) -> Support:
        """Check whether this engine can run on the device, without building anything."""
        ...

    def identity(self, config: SessionConfig) -> Mapping[str, str]:
        """Return all that a compiled artifact of this engine depends on beside the graph: versions, options, shapes.

        Empty where the engine compiles nothing that is worth keeping for such a configuration. Names and values are the
        keys of caches that exist.
        """
        ...

    def compile(self, graph_path: Path, config: SessionConfig, folder: Path) -> None:
        """Write into an empty folder what `build` can start from.

        Raises:
            LoweringError: The runtime refuses the graph.
        """
        ...

    def build(self, graph_path: Path, config: SessionConfig, compiled: Path | None = None) -> Session:
        """Load a graph file.

        Args:
            graph_path: The graph.
            config: How to run it.
            compiled: The folder that `compile` wrote for the same graph and configuration, or None.

        Raises:
            EngineUnavailable: The runtime cannot run here.
            LoweringError: The runtime refuses the graph.
        """
        ...
