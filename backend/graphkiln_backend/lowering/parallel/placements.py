"""What ran in all parts of a split graph, as if it were one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from graphkiln_backend.engines.base import KernelType, Placement


def join_placements(parts: Sequence[Placement]) -> Placement:
    """Adds up what ran; the precision is that of the part with the most products.

    Args:
        parts: At least one.
    """
    nodes, products = Counter[str](), Counter[KernelType]()
    for part in parts:
        nodes.update(part.nodes)
        products.update(part.products)
    largest = max(parts, key=lambda part: (sum(part.products.values()), sum(part.nodes.values())))
    elsewhere = tuple(name for part in parts for name in part.elsewhere)
    return Placement(nodes=dict(nodes), precision=largest.precision, products=dict(products), elsewhere=elsewhere)
