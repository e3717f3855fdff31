"""A source model in numpy and ONNX's text format, for tests of converters without a framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import onnx_ir
from graphs import compute, graph

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_converters.sources.base import InputSpec, SourceModel


@dataclass(frozen=True, kw_only=True)
class TextSource(SourceModel):
    """Source model whose graph is written as text and run by ONNX's reference implementation.

    Attributes:
        text: The graph, without a name.
        weights: Its initializers.
        closed: An element for each call of `close`.
        rows: Rows of each run.
    """

    description: str = "a text"
    libraries: tuple[str, ...] = ("numpy",)
    text: str
    weights: Mapping[str, Any] = field(default_factory=dict)
    closed: list[bool] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, text: str, inputs: tuple[InputSpec, ...], weights: Mapping[str, Any] = {}, **more: Any) -> Self:
        """Make a source of a text."""
        return cls(text=text, inputs=inputs, weights=weights, **more)

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        self.rows.append(len(next(iter(feeds.values()))))
        return compute(self.graph(), **feeds)

    def export(self) -> onnx_ir.Model:
        return self.graph()

    def graph(self) -> onnx_ir.Model:
        return graph(self.text, **self.weights)

    def close(self) -> None:
        self.closed.append(True)
