"""Mapping between the inputs and outputs of a source model and those of the rewritten graph.

A pass that changes inputs or outputs implements the change twice: as nodes, and as an `Edge` in NumPy. The proof runs
the source model through the edge and compares the result with the graph. `Edge()` is the identity.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Ranking, Task, rename_outputs

Arrays = Mapping[str, AnyArray]  # tensors by name

Transform = Callable[[Arrays], dict[str, AnyArray]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Edge:
    """Difference between the inputs and outputs of a graph and those of its source.

    Attributes:
        to_graph_feeds: Source feeds -> graph feeds.
        to_source_feeds: Graph feeds -> source feeds; the inverse.
        to_graph_outputs: Source outputs -> graph outputs.
        to_graph_preprocess: Preprocessing for the source -> preprocessing for the graph.
        inputs: Renamed inputs: source name -> graph name.
        outputs: Renamed outputs: source name -> graph name.
        kept: Source outputs that the graph still depends on; None for all.
        ranking: Graph outputs of a top-k, or None.
    """

    to_graph_feeds: Transform = dict
    to_source_feeds: Transform = dict
    to_graph_outputs: Transform = dict
    to_graph_preprocess: Callable[[Preprocess], Preprocess] = field(default=lambda preprocess: preprocess)
    inputs: Mapping[str, str] = field(default_factory=dict)
    outputs: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] | None = None
    ranking: Ranking | None = None

    def then(self, other: Edge) -> Edge:
        """Compose two edges; `other` is applied second."""
        return Edge(
            to_graph_feeds=lambda feeds: other.to_graph_feeds(self.to_graph_feeds(feeds)),
            to_source_feeds=lambda feeds: self.to_source_feeds(other.to_source_feeds(feeds)),
            to_graph_outputs=lambda outputs: other.to_graph_outputs(self.to_graph_outputs(outputs)),
            to_graph_preprocess=lambda spec: other.to_graph_preprocess(self.to_graph_preprocess(spec)),
            inputs=_joined(self.inputs, other.inputs),
            outputs=_joined(self.outputs, other.outputs),
            kept=self._kept_after(other),
            ranking=other.ranking or self._ranking_after(other),
        )

    def keep(self, outputs: Arrays) -> dict[str, AnyArray]:
        """Select the source's outputs that the graph still needs; the others may have no batch."""
        return {name: array for name, array in outputs.items() if self.kept is None or name in self.kept}

    def input_name(self, name: str) -> str:
        """Return the graph's name of an input of the source."""
        return self.inputs.get(name, name)

    def output_name(self, name: str) -> str:
        """Return the graph's name of an output of the source."""
        return self.outputs.get(name, name)

    def to_graph_task(self, task: Task | None) -> Task | None:
        """Translate the output names of a task to those of the graph."""
        return rename_outputs(task, self.outputs) if task else None

    def _kept_after(self, other: Edge) -> frozenset[str] | None:
        if other.kept is None:
            return self.kept
        needed = set(other.kept)
        if self.ranking and self.ranking.indices in needed:  # computed from the scores
            needed = needed - {self.ranking.indices} | {self.ranking.scores}
        sources = {graph: source for source, graph in self.outputs.items()}
        return frozenset(sources.get(name, name) for name in needed)

    def _ranking_after(self, other: Edge) -> Ranking | None:
        ranking = self.ranking
        if ranking is None or (other.kept is not None and not {ranking.scores, ranking.indices} <= other.kept):
            return None
        return replace(ranking, scores=other.output_name(ranking.scores), indices=other.output_name(ranking.indices))


def _joined(first: Mapping[str, str], second: Mapping[str, str]) -> dict[str, str]:
    """Compose two renamings, without names that map to themselves."""
    made = set(first.values())
    joined = {
        **{source: name for source, name in second.items() if source not in made},
        **{source: second.get(name, name) for source, name in first.items()},
    }
    return {source: name for source, name in joined.items() if source != name}
