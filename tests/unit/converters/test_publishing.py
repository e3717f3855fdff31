"""What a version tells about its graph: preprocessing that is left, labels or ranking, and how it was made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from graphs import graph

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.ranking import Ranking
from graphkiln_backend.graph.task import Classification, Detection, Embedding, Task
from graphkiln_backend.passes.base import PassReport
from graphkiln_backend.passes.edge import Edge
from graphkiln_converters.opening import OpenModel
from graphkiln_converters.publishing import (
    check_edges,
    new_version,
    remaining_preprocess,
    warn_without_preprocess,
    with_fitting_labels,
)
from graphkiln_converters.recipe import Recipe

PIXELS = Preprocess(mean=(0.5,) * 3, std=(0.5,) * 3)
LABELS = ("cat", "dog")


def model(preprocess: Preprocess | None = PIXELS) -> Any:
    source = SimpleNamespace(description="net.py", libraries=("torch",))
    return SimpleNamespace(source=source, preprocess=preprocess, labels=LABELS, task=None)


GOLDEN = GoldenSamples(inputs={}, source_outputs={}, graph_outputs={})


def proven(folder: Path, edge: Edge | None = None) -> Any:
    (folder / "model.onnx").write_bytes(b"12345")
    (folder / "model.onnx.data").write_bytes(b"1234567")
    (folder / "trial").mkdir()
    report = PassReport(name="clean-up", nodes_before=9, nodes_after=5, seconds=0.1, note="two left")
    return SimpleNamespace(
        graph=folder / "model.onnx",
        rewritten=SimpleNamespace(edge=edge or Edge(), reports=(report,)),
        proof=SimpleNamespace(errors={"OUTPUT_0": 1e-7}, signature="signature", golden=GOLDEN),
        verification=("verdict",),
        notes=("a note",),
        precision=Precision.FP16,
    )


def recipe(**options: Any) -> Recipe:
    return Recipe(source="net.onnx", name="net", **options)


def test_what_the_graph_does_not_do_is_left_to_the_client() -> None:
    left = replace(PIXELS, mean=(), std=(), dtype=DType.UINT8)
    edge = Edge(to_graph_preprocess=lambda _: left)
    assert remaining_preprocess(model(), edge) == left
    assert remaining_preprocess(model(), Edge()) == PIXELS
    assert remaining_preprocess(model(None), edge) is None


@pytest.mark.parametrize(
    ("options", "dtype", "refused"),
    [
        ({"precision": "bf16", "lower_edges": True}, DType.FP32, True),
        ({"precision": "bf16", "lower_edges": True}, DType.UINT8, False),
        ({"precision": "fp16", "lower_edges": True}, DType.FP32, False),
        ({"precision": "bf16"}, DType.FP32, False),
    ],
)
def test_no_client_makes_bf16_images(options: dict[str, Any], dtype: DType, refused: bool) -> None:
    preprocess = Preprocess(dtype=dtype)
    if not refused:
        check_edges(recipe(**options), preprocess)
        return
    with pytest.raises(ConversionError, match="clients make no bf16 images") as caught:
        check_edges(recipe(**options), preprocess)
    assert "uint8-nhwc" in caught.value.hint


def test_a_graph_without_images_may_take_bf16() -> None:
    check_edges(recipe(precision="bf16", lower_edges=True), None)


def test_random_weights_are_noted(tmp_path: Path) -> None:
    opened = model()
    opened.source.description = "torchvision:resnet18 with random weights"
    made = new_version(recipe(), opened, proven(tmp_path), command="graphkiln convert", seconds=1)
    assert made.source.description.endswith("with random weights")
    assert made.conversion is not None
    first, *others = made.conversion.notes
    assert first.startswith("the weights are random")
    assert others == ["a note"]


def test_the_conversion_is_recorded(tmp_path: Path) -> None:
    made = new_version(
        recipe(precision="fp16", version=3), model(), proven(tmp_path), command="graphkiln convert", seconds=1.256
    )
    conversion = made.conversion
    assert conversion is not None
    assert conversion.precision is Precision.FP16
    assert conversion.recipe["version"] == 3
    assert conversion.graph_bytes == 5 + 7
    assert conversion.seconds == 1.26
    assert conversion.notes == ("a note",)
    assert conversion.output_errors == {"OUTPUT_0": 1e-7}
    (record,) = conversion.passes
    assert (record.name, record.nodes_before, record.nodes_after, record.note) == ("clean-up", 9, 5, "two left")


def test_its_source_is_named_with_the_libraries_that_matter(tmp_path: Path) -> None:
    info = new_version(recipe(), model(), proven(tmp_path), command="graphkiln convert", seconds=1).source
    assert info.description == "net.py"
    assert info.command == "graphkiln convert"
    assert info.libraries == ("torch", "onnx", "onnxruntime")
    assert info.preprocess == PIXELS
    assert info.labels == LABELS
    assert info.ranking is None


def test_a_ranking_carries_the_labels_since_triton_would_attach_them_by_rank(tmp_path: Path) -> None:
    edge = Edge(ranking=Ranking(scores="OUTPUT_0", indices="INDEX_0"))
    info = new_version(recipe(top_k=2), model(), proven(tmp_path, edge), command="", seconds=1).source
    assert info.labels == ()
    assert info.ranking == Ranking(scores="OUTPUT_0", indices="INDEX_0", labels=LABELS)


def test_the_largest_batch_is_the_recipes(tmp_path: Path) -> None:
    made = new_version(recipe(max_batch_size=7), model(), proven(tmp_path), command="", seconds=1)
    assert made.max_batch_size == 7


class TestFittingLabels:
    LABELS = ("a", "b", "c")

    def fitted(self, text: str, labels: Path | None = None, **options: Any) -> tuple[str, ...]:
        source: Any = SimpleNamespace()
        model = OpenModel(source=source, inputs=(), preprocess=None, labels=self.LABELS)
        return with_fitting_labels(model, recipe(labels=labels, **options), graph(text)).labels

    @pytest.mark.parametrize("shape", ["batch,3", "batch,n", "batch,5,8,8"])
    def test_one_for_each_class_or_classes_that_nobody_can_count(self, shape: str) -> None:
        assert self.fitted(f"(float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}") == self.LABELS

    def test_those_of_a_source_that_do_not_fit_are_left_out_and_told(self, logged: list[str]) -> None:
        assert self.fitted("(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }") == ()
        assert "3 labels for the 4 classes" in logged[0]

    def test_those_of_the_user_must_fit(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"l\.txt has 3 labels for the 4 classes"):
            self.fitted("(float[batch,4] x) => (float[batch,4] y) { y = Relu(x) }", tmp_path / "l.txt")

    def test_of_a_detector_whose_first_output_has_no_classes(self) -> None:
        task = Detection(boxes="b", scores="y", classes="c", counts="n")
        model = OpenModel(source=Any, inputs=(), preprocess=None, labels=self.LABELS, task=task)  # type: ignore[arg-type]
        scores = graph("(float[batch,300] x) => (float[batch,300] y) { y = Relu(x) }")
        assert with_fitting_labels(model, recipe(), scores).labels == self.LABELS

    def test_of_the_output_that_is_kept(self) -> None:
        text = (
            "(float[batch,4] x, float[batch,3] z) => (float[batch,4] y, float[batch,3] w) { y = Relu(x) w = Relu(z) }"
        )
        assert self.fitted(text, outputs=["w"]) == self.LABELS
        assert self.fitted(text, outputs=["y"]) == ()


@pytest.mark.parametrize(
    ("task", "preprocess", "warned"),
    [
        (Embedding(vectors="v"), None, True),
        (Embedding(vectors="v"), PIXELS, False),
        (Classification(), None, False),
        (None, None, False),
    ],
)
def test_a_task_that_no_client_could_ask_about_an_image_is_told(
    caplog: pytest.LogCaptureFixture, task: Task | None, preprocess: Preprocess | None, warned: bool
) -> None:
    warn_without_preprocess(OpenModel(source=model().source, inputs=(), preprocess=preprocess, labels=(), task=task))
    assert ("--preprocess" in caplog.text) == warned
