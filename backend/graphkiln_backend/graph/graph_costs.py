"""What each node of a graph costs: arithmetic, weights, and the activations that pass between nodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeCost:
    """One node. Activations are those of one sample; dimensions that vary count as 1 where nobody says it.

    Attributes:
        name: Of the node.
        op_type: Its operator.
        flops: Floating-point operations of a convolution or matrix product (a multiply and an add are two).
        weights: Bytes of each weight that it reads, by name.
        reads: Names of the activations that it reads.
        writes: Bytes of each activation that it computes, by name.
        fuses: Whether runtimes compute it together with the node that it reads from.
        opens: Whether runtimes compute it together with the nodes that read from it.
    """

    name: str
    op_type: str
    flops: int = 0
    weights: Mapping[str, int] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    writes: Mapping[str, int] = field(default_factory=dict)
    fuses: bool = False
    opens: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class GraphCosts:
    """All nodes of a graph in an order in which they can be computed.

    Attributes:
        nodes: The nodes.
        inputs: Bytes of each input of the graph, by name.
        outputs: Names of the outputs of the graph.
        local: Names of activations that cannot be handed to another stage: every shard holds a part of them, or they
            are no tensors of a known type.
    """

    nodes: tuple[NodeCost, ...]
    inputs: Mapping[str, int]
    outputs: frozenset[str]
    local: frozenset[str] = frozenset()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights; one that several nodes read counts once."""
        return sum({name: size for node in self.nodes for name, size in node.weights.items()}.values())

    @property
    def activations(self) -> dict[str, int]:
        """Bytes of one sample of each input and of each activation that a node computes, by name."""
        return {**self.inputs, **{name: size for node in self.nodes for name, size in node.writes.items()}}

    @property
    def flops(self) -> int:
        """Of one sample."""
        return sum(node.flops for node in self.nodes)
