"""How fast devices compute and hand tensors on, for comparing splits: ratios count, not seconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from graphkiln_backend.graph.graph_costs import GraphCosts

Seconds = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """A device and its link to the next one.

    Attributes:
        flops_per_s: Of convolutions and matrix products.
        bytes_per_s: Of its memory, for all other nodes and for reading weights.
        link_bytes_per_s: Of what hands a tensor to another device.
        link_s: What handing on takes beside, of any size.
    """

    flops_per_s: float
    bytes_per_s: float
    link_bytes_per_s: float
    link_s: float

    def node_seconds(self, costs: GraphCosts, rows: int) -> Seconds:
        """Seconds of each node, `[nodes]`: of its arithmetic or of its bytes, whichever takes longer.

        Args:
            costs: Of one sample.
            rows: Samples.

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


CPU_CORE = Speed(flops_per_s=5e10, bytes_per_s=8e9, link_bytes_per_s=8e9, link_s=5e-5)
"""A core of a server's CPU with AVX2 and its share of the memory; a tensor is handed on by one thread to another."""
PCIE_GPU = Speed(flops_per_s=4e13, bytes_per_s=2e12, link_bytes_per_s=2.5e10, link_s=1e-5)
"""An A100 that computes fp32 products in TF32, at a third of its peak, behind PCIe 4.0 x16.

Source: NVIDIA, "A100 Tensor Core GPU" (data sheet); PCI-SIG, "PCI Express 4.0" (31.5 GB/s before packets)."""
