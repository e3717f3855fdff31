"""Speed of devices and links, for comparing splits: ratios count, not seconds.

Times that were measured for the nodes of a graph (`node_times.json` beside it) go before counted costs.
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
        link_bytes_per_s: Speed of handing a tensor to another device.
        link_s: Time of handing on a tensor of no size.
    """

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    link_s: float

    def node_seconds(self, costs: GraphCosts, rows: int) -> Seconds:
        """Seconds of each node for some rows, `[nodes]`: of its arithmetic or of its bytes, the longer one.

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
        """Seconds of handing tensors of some bytes to another device."""
        return self.link_s + size_bytes / self.link_bytes_per_s


# A core of a server's CPU with AVX2 and its share of the memory; a tensor is handed on by one thread to another.
CPU_CORE = Speed(flops_per_s=5e10, bytes_per_s=8e9, link_bytes_per_s=8e9, link_s=5e-5)
# An A100 that computes fp32 products in TF32, at a third of its peak, behind PCIe 4.0 x16. Source: NVIDIA, "A100
# Tensor Core GPU" (data sheet); PCI-SIG, "PCI Express 4.0" (31.5 GB/s before packets).
PCIE_GPU = Speed(flops_per_s=4e13, bytes_per_s=2e12, link_bytes_per_s=2.5e10, link_s=1e-5)


# A node that is counted as nothing, such as one that reads a shape, takes so long: it may be measured all the same.
_LEAST_S = 1e-9


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredSpeed(Speed):
    """A device by the measured times of a graph's nodes; where a node has none, by its share of the counted costs.

    Between two batch sizes that were measured, and for shards, a node takes as many times its counted cost as there.

    Attributes:
        times: Measured times.
        whole: Counted costs of the graph that was measured.
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
        """Describe the measurement, and how many nodes it covers."""
        named = [node.name for node in self.whole.nodes]
        found = sum(name in self.times.at(self.times.sizes[0]) for name in named)
        rest = "" if found == len(named) else f"; the other {len(named) - found} by their counted share"
        sizes = " and ".join(map(str, self.times.sizes))
        return (
            f"costs: measured by {self.times.runtime} on {self.times.machine} for batches of {sizes} "
            f"({NODE_TIMES_FILE}), {found} of {len(named)} nodes{rest}"
        )

    def _factors(self, costs: GraphCosts, size: int) -> Seconds:
        """Ratio of measured to counted time of each node for a batch size that was measured, `[nodes]`."""
        counted = Speed.node_seconds(self, self.whole, size) + _LEAST_S
        measured = self.times.at(size)
        pairs = {
            node.name: (measured[node.name], float(seconds))
            for node, seconds in zip(self.whole.nodes, counted, strict=True)
            if node.name in measured
        }
        usual = _ratio(pairs)
        return np.array([_ratio_of(pairs, node.name, usual) for node in costs.nodes], np.float64)


def find_times(version: ModelVersion) -> NodeTimes | None:
    """Read the measured times of a version's graph; None where there are none.

    Raises:
        LoweringError: The file beside the graph cannot be used: it is damaged, or of another graph.
    """
    path = version.graph_path.parent / NODE_TIMES_FILE
    if not path.exists():
        return None
    times = NodeTimes.read(path)
    if times.graph != graph_digest(version):
        raise unusable(path, "it was measured of another graph")
    return times


def graph_digest(version: ModelVersion) -> str:
    """Return the SHA-256 of a version's graph, by which measured times name it."""
    return version.manifest.sha256 if version.manifest else graph_sha256(version.graph_path)


def _ratio(pairs: Mapping[str, tuple[float, float]]) -> float:
    """Ratio of all that was measured to its counted time; 1 where no node of the graph was measured."""
    return sum(taken for taken, _ in pairs.values()) / sum(cost for _, cost in pairs.values()) if pairs else 1.0


def _ratio_of(pairs: Mapping[str, tuple[float, float]], name: str, usual: float) -> float:
    taken, cost = pairs.get(name, (usual, 1.0))
    return taken / cost


# Times are measured in a session that fuses nothing: the runtime names fused nodes and blocks of channels (NCHWc) after
# values that the graph does not have. So a convolution and its activation are timed apart, as their costs are counted.

_RUNS = 7  # of each batch size; the median counts
# With its position, the name of a node while it is measured: those inside of other nodes may have the same names.
_NAME = "graphkiln-node-"


def measure_nodes(version: ModelVersion, *, largest_batch: int, op_libraries: Sequence[str] = ()) -> NodeTimes:
    """Measure each node for single samples and for the largest batch.

    Args:
        version: The version.
        largest_batch: Largest batch of its requests; 1 where batches cannot be split.
        op_libraries: Libraries of custom operators.

    Raises:
        LoweringError: The graph cannot be read, or no request is known that it computes.
        GraphkilnError: The runtime refuses it.
    """
    with _opened(version.graph_path, op_libraries) as (session, names):
        sizes = sorted({1, largest_batch}) if session.signature.batchable else [1]
        taken = {str(size): _measure(session, names, _feeds(session, version.golden, size)) for size in sizes}
    runtime = f"{REFERENCE_ENGINE} {version_of(REFERENCE_ENGINE)}"
    return NodeTimes(graph=graph_digest(version), runtime=runtime, machine=hardware.identity(CPU), batches=taken)


def keep_times(version: ModelVersion, times: NodeTimes) -> Path:
    """Write measured times beside the graph, where plans look for them, and return the file.

    Raises:
        LoweringError: They cannot be written there.
    """
    path = version.graph_path.parent / NODE_TIMES_FILE
    try:
        path.write_text(times.text())
    except OSError as error:
        raise LoweringError(
            f"cannot write {path}", attempts=(str(error.strerror),), hint="measure in a store that can be written"
        ) from error
    return path


@contextmanager
def _opened(graph_path: Path, op_libraries: Sequence[str]) -> Iterator[tuple[TimedSession, list[str]]]:
    """The graph on one core with nothing fused, its nodes named by position; and the names that splits give them.

    Nodes that compute from weights alone have no name.
    """
    from graphkiln_backend.passes.constants import find_constant_nodes  # a second of imports
    from graphkiln_backend.passes.graph_file import save
    from graphkiln_backend.passes.node_costs import load_for_splitting

    model = load_for_splitting(graph_path)
    constant = frozenset(find_constant_nodes(model))  # which is computed while the graph is loaded
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
            yield _timed(session), names


def _timed(session: Session) -> TimedSession:
    if not isinstance(session, TimedSession):
        raise TypeError(f"{type(session).__name__} cannot time nodes")
    return session


def _feeds(session: Session, golden: GoldenSamples | None, size: int) -> Mapping[str, AnyArray]:
    """A batch that the graph computes: of golden samples, or else made up."""
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
        "nothing can be measured",
        attempts=("the graph has no golden samples, and refuses every request that was made up",),
        hint="convert it with samples that make sense to it (graphkiln convert FILE.onnx --samples DIR)",
    )


def _measure(session: TimedSession, names: Sequence[str], feeds: Mapping[str, AnyArray]) -> dict[str, float]:
    """Seconds of each node by the name that splits give it."""
    taken = session.time_nodes(feeds, _RUNS)
    found = ((name, taken.get(f"{_NAME}{position}")) for position, name in enumerate(names) if name)
    return {name: seconds for name, seconds in found if seconds is not None}
