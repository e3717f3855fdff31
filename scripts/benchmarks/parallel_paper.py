"""One model over two to eight GPUs, on paper: from counted costs and the speeds of data sheets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from measurement import show_progress
from parallel_estimate import NVLINK_GPU, Estimate, estimate_copies, estimate_pipeline, estimate_shards
from parallel_models import GRAPHS

from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.lowering.parallel.parts import count_costs
from graphkiln_backend.lowering.parallel.speed import PCIE_GPU, Speed

_BATCH = 32
_GPUS = (2, 4, 8)
_LINKS = {"PCIe 4.0": PCIE_GPU, "NVLink 3": NVLINK_GPU}


def benchmark_devices(_: int, __: float) -> list[dict[str, object]]:
    """On paper: models over two to eight GPUs."""
    rows = []
    for name, graph in GRAPHS.items():
        show_progress(f"{name}: counting")
        path = graph()
        for link, speed in _LINKS.items():
            whole = _costs(path, 1)
            one = estimate_copies(whole, 1, speed, _BATCH)
            rows.append(_row(name, link, "whole", 1, one, one))
            for count in _GPUS:
                rows.append(_row(name, link, "data", count, estimate_copies(whole, count, speed, _BATCH), one))
                rows += [
                    _row(name, link, way, count, found, one)
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


def _row(  # noqa: PLR0917 - the columns
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
