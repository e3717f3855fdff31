"""Which nodes of a graph stay fp32 when it is quantized: what a person said, and what decides nothing about speed."""

from __future__ import annotations

from collections.abc import Iterable

import onnx_ir

from graphkiln_backend.passes.precision import matches
from graphkiln_backend.repository.onnx_file import PRODUCTS
from graphkiln_converters.recipe import Recipe


def kept_by_recipe(model: onnx_ir.Model, recipe: Recipe) -> list[str]:
    """Names of the nodes that a recipe keeps in fp32, and of those behind the last products.

    Args:
        model: Its nodes have names.
        recipe: What stays fp32.
    """
    products = [str(node.name) for node in model.graph if node.op_type in PRODUCTS]
    ends = [] if recipe.quantize_ends or not products else [products[0], products[-1]]
    said = [str(node.name) for node in model.graph if matches(node, recipe.keep_fp32)]
    return [*said, *ends, *behind_products(model)]


def behind_products(model: onnx_ir.Model) -> list[str]:
    """Names of the nodes that no product depends on: what is read from the last layers.

    There is little to compute there, and much to lose: coordinates of boxes in 256 steps are off by pixels.
    """
    products = [node for node in model.graph if node.op_type in PRODUCTS]
    before = _ancestors(products)
    return [str(node.name) for node in model.graph if node not in before and node.op_type not in PRODUCTS]


def _ancestors(nodes: Iterable[onnx_ir.Node]) -> set[onnx_ir.Node]:
    """Every node that one of some nodes depends on."""
    found: set[onnx_ir.Node] = set()
    waiting = list(nodes)
    while waiting:
        producers = {value.producer() for value in waiting.pop().inputs if value is not None}
        new = {producer for producer in producers if producer is not None} - found
        found |= new
        waiting += new
    return found
