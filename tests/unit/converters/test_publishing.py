"""What a new version tells the server and its clients."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from graphs import draw
from sources import TextSource

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.passes.base import PassReport, Rewritten
from graphkiln_backend.passes.edge import Edge
from graphkiln_converters.opening import OpenModel
from graphkiln_converters.proving import Proof, ProvenGraph
from graphkiln_converters.publishing import check_edges, new_version, remaining_preprocess
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.writer import NewVersion

SPEC = Preprocess(resize=8, mean=(0.1, 0.2, 0.3))
RANKING = Ranking(scores="OUTPUT_0", indices="INDEX_0")


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "text", "name": "m", "version": 3, **fields})


def model(preprocess: Preprocess | None = SPEC) -> OpenModel:
    source = TextSource("", (), description="a text", libraries=("numpy",))
    return OpenModel(source=source, inputs=(), preprocess=preprocess, labels=("a", "b"))


def version(folder: Path, edge: Edge | None = None, **fields: Any) -> NewVersion:
    (folder / "model.onnx").write_bytes(bytes(100))
    (folder / "model.onnx.data").write_bytes(bytes(23))
    (folder / "trial").mkdir()
    report = PassReport(name="clean-up", nodes_before=9, nodes_after=7, seconds=1.5, note="2 left")
    proof = Proof(
        verification=(), errors={"y": 1e-7}, noise=0.0, signature=Signature(inputs=(), outputs=()),
        golden=GoldenSamples(inputs={"x": draw(2, 3)}, source_outputs={}, graph_outputs={}),
    )  # fmt: skip
    proven = ProvenGraph(
        graph=folder / "model.onnx", proof=proof, rewritten=Rewritten(reports=(report,), edge=edge or Edge()),
        verification=(), notes=("a note",),
    )  # fmt: skip
    return new_version(recipe(**fields), model(), proven, command="a command", seconds=1.23456)


def test_the_conversion_is_recorded(tmp_path: Path) -> None:
    conversion = version(tmp_path, softmax=True).conversion
    assert conversion is not None
    (record,) = conversion.passes
    assert (record.name, record.nodes_before, record.nodes_after, record.note) == ("clean-up", 9, 7, "2 left")
    assert (conversion.graph_bytes, conversion.seconds, conversion.notes) == (123, 1.23, ("a note",))
    assert (conversion.recipe["version"], conversion.recipe["softmax"]) == (3, True)
    assert conversion.output_errors == {"y": 1e-7}


def test_the_source_is_told(tmp_path: Path) -> None:
    info = version(tmp_path).source
    assert (info.description, info.command) == ("a text", "a command")
    assert info.libraries == ("numpy", "onnx", "onnxruntime")
    assert (info.labels, info.ranking, info.preprocess) == (("a", "b"), None, SPEC)


def test_labels_of_a_ranking_are_in_it_and_not_beside_it(tmp_path: Path) -> None:
    """Triton attaches labels by place, which in a ranking is the rank."""
    info = version(tmp_path, Edge(ranking=RANKING), top_k=2).source
    assert info.labels == ()
    assert info.ranking == replace(RANKING, labels=("a", "b"))


def test_clients_do_what_the_edge_leaves(tmp_path: Path) -> None:
    edge = Edge(to_graph_preprocess=lambda spec: replace(spec, layout="HWC"))
    assert version(tmp_path, edge).source.preprocess == replace(SPEC, layout="HWC")
    assert remaining_preprocess(model(preprocess=None), edge) is None


@pytest.mark.parametrize(
    ("fields", "preprocess"),
    [
        ({"precision": "bf16"}, SPEC),
        ({"precision": "fp16", "lower_edges": True}, SPEC),
        ({"precision": "bf16", "lower_edges": True}, None),
        ({"precision": "bf16", "lower_edges": True}, Preprocess(dtype=DType.UINT8)),
        ({"lower_edges": True}, SPEC),
    ],
)
def test_edges_that_clients_can_make(fields: dict[str, Any], preprocess: Preprocess | None) -> None:
    check_edges(recipe(**fields), preprocess)


def test_and_one_that_they_cannot() -> None:
    with pytest.raises(ConversionError, match="clients make no bf16 images"):
        check_edges(recipe(precision="bf16", lower_edges=True), SPEC)
