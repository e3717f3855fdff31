"""Measure the time of each node of a graph on one core, for plans that balance stages by it.

In a session that fuses nothing: fused nodes have names of the runtime's own, and what blocks of channels are computed
in (NCHWc) is named after values that the graph does not have. So a convolution and its activation are told apart, as
they are where costs are counted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from graphkiln_backend.engines import hardware
from graphkiln_backend.engines.base import Session, SessionConfig, SessionTuning, TimedSession
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import GraphkilnError, LoweringError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.graph_costs import NODE_TIMES_FILE, NodeTimes
from graphkiln_backend.graph.modules import version_of
from graphkiln_backend.lowering.parallel.measured_speed import graph_digest
from graphkiln_backend.lowering.warmup import synthetic_inputs
from graphkiln_backend.repository.version import ModelVersion

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
