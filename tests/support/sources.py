"""A source model in numpy and ONNX's text, for tests of the converters without any framework."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir
from graphs import compute, graph

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_converters.sources.base import InputSpec


@dataclass
class TextSource:
    """A `SourceModel` whose graph is written as text, run by ONNX's reference implementation.

    Attributes:
        text: The graph, without a name.
        inputs: Its inputs.
        weights: Its initializers.
        closed: How often it was closed.
        rows: Rows of each run.
    """

    text: str
    inputs: tuple[InputSpec, ...]
    weights: Mapping[str, Any] = field(default_factory=dict)
    preprocess: Preprocess | None = None
    labels: tuple[str, ...] = ()
    description: str = "a text"
    libraries: tuple[str, ...] = ("numpy",)
    closed: int = 0
    rows: list[int] = field(default_factory=list)

    def run(self, feeds: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
        self.rows.append(len(next(iter(feeds.values()))))
        return compute(self.graph(), **feeds)

    def export(self, dynamic: Mapping[str, Mapping[int, tuple[int, int]]]) -> onnx_ir.Model:  # noqa: ARG002
        return self.graph()

    def graph(self) -> onnx_ir.Model:
        return graph(self.text, **self.weights)

    def close(self) -> None:
        self.closed += 1
