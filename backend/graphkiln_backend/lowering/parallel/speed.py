"""Speed of devices and links, for comparing splits: only ratios matter, not absolute seconds.

Measured times of a graph's nodes (`node_times.json` beside the graph) take precedence over counted costs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Session, SessionConfig, SessionTuning, TimedSession
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, GraphCosts, NodeTimes, unusable
from graphkiln_backend.graph.modules import version_of
from graphkiln_backend.lowering.trial import synthetic_inputs
from graphkiln_backend.repository.onnx_file import graph_sha256
from graphkiln_backend.repository.version import ModelVersion

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A device and its link to the next one.

    Attributes:
        flops_per_s: Speed of convolutions and matrix products.
        bytes_per_s: Speed of its memory, for all other nodes and for reading weights.
        link_bytes_per_s: Bandwidth of the link to another device.
        link_s: Latency of the link.
    """

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    link_s: float

    def node_seconds(self, costs: GraphCosts, rows: int) -> Seconds:
        """Estimate the seconds of each node, `[nodes]`: the longer of its arithmetic and its memory traffic.

        Source: S. Williams et al., "Roofline: An Insightful Visual Performance Model", 2009.
        """
        sizes = costs.activations
        found = []
        for node in costs.nodes:
            activations = sum(node.writes.values()) + sum(sizes.get(name, 0) for name in node.reads)
            moved = (rows * activations + sum(node.weights.values())) / self.bytes_per_s
            found.append(max(rows * node.flops / self.flops_per_s, moved))
        return np.array(found, np.float64)

    def link_seconds(self, size_bytes: float) -> float:
        """Estimate the seconds of a transfer to another device."""
        return self.link_s + size_bytes / self.link_bytes_per_s


# A core of a server CPU with AVX2 and its share of the memory bandwidth; the link is between two threads.
CPU_CORE = Speed(flops_per_s=5e10, bytes_per_s=8e9, link_bytes_per_s=8e9, link_s=5e-5)
# An A100 that computes fp32 products in TF32, at a third of its peak, behind PCIe 4.0 x16. Source: NVIDIA, "A100
# Tensor Core GPU" (data sheet); PCI-SIG, "PCI Express 4.0" (31.5 GB/s before packets).
PCIE_GPU = Speed(flops_per_s=4e13, bytes_per_s=2e12, link_bytes_per_s=2.5e10, link_s=1e-5)
_LEAST_S = 1e-9  # of a node whose counted cost is zero, such as Shape, so that it can have a measured time


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed(Speed):
    """A device with measured times of a graph's nodes; nodes without a time get their share of the counted costs.

    For shards and unmeasured batch sizes, the counted cost of a node is scaled by its measured ratio.

    Attributes:
        times: Measured times.
        whole: Counted costs of the measured graph.
    """

    times: NodeTimes
    whole: GraphCosts

    @classmethod
    def of(cls, speed: Speed, times: NodeTimes, whole: GraphCosts) -> MeasuredSpeed:
        """Add measured times to a device."""
        return cls(**asdict(speed), times=times, whole=whole)

    def node_seconds(self, costs: GraphCosts, rows: int) -> Seconds:
        """See `Speed.node_seconds`."""
        counted = Speed.node_seconds(self, costs, rows) + _LEAST_S
        factors = np.stack([self._factors(costs, size) for size in self.times.sizes])
        return counted * [np.interp(rows, self.times.sizes, of_node) for of_node in factors.T]

    def explain(self) -> str:
        """Describe the measurement and the number of nodes that it covers."""
        named = [node.name for node in self.whole.nodes]
        found = sum(name in self.times.at(self.times.sizes[0]) for name in named)
        rest = "" if found == len(named) else f"; the other {len(named) - found} by counted costs"
        sizes = " and ".join(map(str, self.times.sizes))
        return (
            f"costs: measured by {self.times.runtime} on {self.times.machine} for batches of {sizes} "
            f"({NODE_TIMES_FILE}), {found} of {len(named)} nodes{rest}"
        )

    def _factors(self, costs: GraphCosts, size: int) -> Seconds:
        """Return the ratio of measured to counted time of each node for a measured batch size, `[nodes]`."""
        counted = Speed.node_seconds(self, self.whole, size) + _LEAST_S
        measured = self.times.at(size)
        pairs = {
            node.name: (measured[node.name], float(seconds))
            for node, seconds in zip(self.whole.nodes, counted, strict=True)
            if node.name in measured
        }
        # Unmeasured nodes get the ratio of all measured ones, or 1 if no node was measured.
        usual = np.sum([*pairs.values()], axis=0) if pairs else (1.0, 1.0)
        taken, cost = np.transpose([pairs.get(node.name, usual) for node in costs.nodes])
        ratios: Seconds = taken / cost
        return ratios


def find_times(version: ModelVersion) -> NodeTimes | None:
    """Read the measured times of a version's graph, or return None if there are none.

    Raises:
        LoweringError: The file is damaged or belongs to another graph.
    """
    path = version.graph_path.parent / NODE_TIMES_FILE
    if not path.exists():
        return None
    times = NodeTimes.read(path)
    if times.graph != graph_digest(version):
        raise unusable(path, "it was measured of another graph")
    return times


def graph_digest(version: ModelVersion) -> str:
    """Return the SHA-256 of a version's graph, which identifies it in measured times."""
    return version.manifest.sha256 if version.manifest else graph_sha256(version.graph_path)


# Times are measured in a session without fusions, since the runtime gives fused nodes and NCHWc blocks other names. A
# convolution and its activation are timed separately, in the same way as their costs are counted.

_RUNS = 7  # per batch size; the median counts
_NAME = "graphkiln-node-"  # prefix of unique node names: nodes of subgraphs may share names with others


def measure_nodes(version: ModelVersion, *, largest_batch: int, op_libraries: Sequence[str] = ()) -> NodeTimes:
    """Measure each node for single samples and for the largest batch.

    Args:
        version: The version.
        largest_batch: Largest batch of requests; 1 if batches cannot be split.
        op_libraries: Libraries of custom operators.

    Raises:
        LoweringError: The graph cannot be read, or refuses every synthetic request.
        GraphkilnError: The runtime refuses the graph.
    """
    with _opened(version.graph_path, op_libraries) as (session, names):
        sizes = sorted({1, largest_batch}) if session.signature.batchable else [1]
        taken = {str(size): _measure(session, names, _feeds(session, version.golden, size)) for size in sizes}
    runtime = f"{REFERENCE_ENGINE} {version_of(REFERENCE_ENGINE)}"
    return NodeTimes(graph=graph_digest(version), runtime=runtime, machine=hardware.identity(CPU), batches=taken)


def keep_times(version: ModelVersion, times: NodeTimes) -> Path:
    """Write measured times beside the graph, and return the file.

    Raises:
        LoweringError: The file cannot be written.
    """
    path = version.graph_path.parent / NODE_TIMES_FILE
    try:
        path.write_text(times.text())
    except OSError as error:
        raise LoweringError(
            f"cannot write {path}", attempts=(str(error.strerror),), hint="measure in a writable model store"
        ) from error
    return path


@contextmanager
def _opened(graph_path: Path, op_libraries: Sequence[str]) -> Iterator[tuple[TimedSession, list[str]]]:
    """Open the graph on one core without fusions, with nodes named by position.

    Yields:
        The session, and the original node names by position; empty for nodes that compute from weights alone.
    """
    from graphkiln_backend.passes.constants import find_constant_nodes  # a second of imports
    from graphkiln_backend.passes.graph_file import save
    from graphkiln_backend.passes.node_costs import load_for_splitting

    model = load_for_splitting(graph_path)
    constant = frozenset(find_constant_nodes(model))  # computed while the graph is loaded
    names = ["" if node in constant else str(node.name) for node in model.graph]
    for position, node in enumerate(model.graph):
        node.name = f"{_NAME}{position}"
    config = SessionConfig(
        engine=REFERENCE_ENGINE,
        device=CPU,
        threads=1,
        spin=False,
        reason="measuring nodes",
        tuning=SessionTuning(graph_level="off"),
        op_libraries=tuple(op_libraries),
    )
    with tempfile.TemporaryDirectory(prefix="graphkiln-times-") as folder:
        save(model, Path(folder) / "model.onnx")
        with load_engine(REFERENCE_ENGINE).build(Path(folder) / "model.onnx", config) as session:
            if not isinstance(session, TimedSession):
                raise TypeError(f"{type(session).__name__} cannot time nodes")
            yield session, names


def _feeds(session: Session, golden: GoldenSamples | None, size: int) -> Mapping[str, AnyArray]:
    """Return a batch of golden samples, or of synthetic inputs that the graph accepts."""
    if golden:
        return golden.batch(size)
    for inputs in synthetic_inputs(session.signature):
        feeds = inputs.batch(session.signature, size)
        try:
            session.run(feeds)
        except GraphkilnError:
            continue
        return feeds
    raise LoweringError(
        "cannot measure the graph",
        attempts=("it has no golden samples, and refuses every synthetic request",),
        hint="convert it with valid samples (graphkiln convert FILE.onnx --samples DIR)",
    )


def _measure(session: TimedSession, names: Sequence[str], feeds: Mapping[str, AnyArray]) -> dict[str, float]:
    """Return the seconds of each node by its original name."""
    taken = session.time_nodes(feeds, _RUNS)
    found = ((name, taken.get(f"{_NAME}{position}")) for position, name in enumerate(names) if name)
    return {name: seconds for name, seconds in found if seconds is not None}
