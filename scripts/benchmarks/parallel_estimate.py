"""What a split would give on devices that are not here: time and throughput on paper.

From the counted costs of nodes and the speeds of devices and links. A sum over `p` devices sends twice
the share `(p - 1) / p` of its bytes, as rings do it.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graphkiln_backend.graph.graph_costs import GraphCosts
from graphkiln_backend.lowering.parallel.cuts import find_stages
from graphkiln_backend.lowering.parallel.speed import PCIE_GPU, Speed
from graphkiln_backend.passes.node_costs import ALL_REDUCE

NVLINK_GPU = replace(PCIE_GPU, link_bytes_per_s=2.4e11, link_s=8e-6)
"""An A100 behind NVLink of the third generation (300 GB/s each way).

Source: NVIDIA, "A100 Tensor Core GPU" (data sheet)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """What one copy of a model would give.

    Attributes:
        latency_s: Of one batch, from the first device to the last.
        rate: Samples per second at a load that fills all devices.
        weight_share: Of the model's weights, on the device that holds most.
        sum_share: Of the latency, what sums between shards take.
    """

    latency_s: float
    rate: float
    weight_share: float
    sum_share: float


def estimate_pipeline(costs: GraphCosts, stages: int, speed: Speed, rows: int) -> Estimate:
    """A pipeline that is kept full by batches behind each other.

    Args:
        costs: Of the whole graph.
        stages: How many.
        speed: Of each device.
        rows: Samples of a micro-batch.

    Raises:
        LoweringError: The graph has not that many places to cut.
    """
    found = find_stages(costs, stages, speed, rows=rows)
    return Estimate(
        latency_s=sum(stage.seconds for stage in found),
        rate=rows / max(stage.seconds for stage in found),
        weight_share=max(stage.weight_bytes for stage in found) / max(1, costs.weight_bytes),
        sum_share=0.0,
    )


def estimate_shards(whole: GraphCosts, shard: GraphCosts, shards: int, speed: Speed, rows: int) -> Estimate:
    """Shards of one stage.

    Args:
        whole: The costs of the whole graph.
        shard: The costs of one shard, with a node for each sum.
        shards: How many.
        speed: Of each device.
        rows: Samples of a batch.
    """
    computed = speed.node_seconds(shard, rows)
    sums = [sum(node.writes.values()) for node in shard.nodes if node.op_type == ALL_REDUCE]
    own = sum(seconds for node, seconds in zip(shard.nodes, computed, strict=True) if node.op_type != ALL_REDUCE)
    handed = sum(speed.link_seconds(2 * (shards - 1) / shards * rows * size) for size in sums)
    return Estimate(
        latency_s=own + handed,
        rate=rows / (own + handed),
        weight_share=shard.weight_bytes / max(1, whole.weight_bytes),
        sum_share=handed / (own + handed),
    )


def estimate_copies(costs: GraphCosts, copies: int, speed: Speed, rows: int) -> Estimate:
    """Whole copies, each on a device of its own.

    Args:
        costs: Of the whole graph.
        copies: How many.
        speed: Of each device.
        rows: Samples of a batch.
    """
    seconds = float(speed.node_seconds(costs, rows).sum())
    return Estimate(latency_s=seconds, rate=copies * rows / seconds, weight_share=1.0, sum_share=0.0)
