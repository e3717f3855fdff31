"""Preparation of a story's images and graphs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stories import ON_CPU, story_request

from graphkiln.story import preparation as module
from graphkiln.story.digits import Digits, digit_image, split_digits
from graphkiln.story.preparation import Conversions, ModelFacts, PreparedModel, prepare_model
from graphkiln.story.variants import TRAINING_GRAPH, GraphSpec
from graphkiln_backend.graph.errors import ConversionError, MeasurementError
from graphkiln_backend.graph.preprocess import Preprocess

BASE = GraphSpec(name="base")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    facts = ModelFacts(preprocess=Preprocess(), classes=10, derivative="output:image")
    return PreparedModel(request=story_request(), platform=ON_CPU, facts=facts)


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record when the source is opened and closed."""
    events: list[str] = []

    @contextmanager
    def export_source(recipe: Any) -> Iterator[SimpleNamespace]:
        events.append(f"open {recipe.source}")
        yield SimpleNamespace(graph="exported")
        events.append("close")

    monkeypatch.setattr(module, "export_source", export_source)
    return events


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, exports: list[str]) -> dict[str, Any]:
    """Record converted recipes; rewriting has an effective and an ineffective pass."""
    assert not exports
    found: dict[str, Any] = {}

    def rewrite(graph: str, *_: object) -> SimpleNamespace:
        assert graph == "exported"
        reports = [
            SimpleNamespace(name="pad-into-conv", nodes_before=9, nodes_after=8),
            SimpleNamespace(name="add-into-producer", nodes_before=8, nodes_after=8),
        ]
        return SimpleNamespace(rewritten=SimpleNamespace(reports=reports))

    def convert(recipe: Any, *, command: str, exported: SimpleNamespace) -> None:
        assert (command, exported.graph) == ("graphkiln story", "exported")
        found[recipe.name] = recipe
        version = recipe.model_store / recipe.name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text('name: "base"\n')

    monkeypatch.setattr(module, "rewrite_or_leave_out", rewrite)
    monkeypatch.setattr(module, "convert", convert)
    return found


class TestSavedGraph:
    def test_is_converted_once(self, model: PreparedModel, conversions: dict[str, Any]) -> None:
        path = model.saved_graph(BASE)
        assert path == story_request().folder / "models" / "base" / "base" / "1" / "model.onnx"
        recipe = conversions.pop("base")
        assert (recipe.source, recipe.max_batch_size) == ("torchvision:resnet18", 8)
        assert model.saved_graph(BASE) == path
        assert conversions == {}

    @pytest.mark.usefixtures("conversions")
    def test_source_is_exported_once(self, model: PreparedModel, exports: list[str]) -> None:
        with model:
            for spec in (BASE, replace(BASE, name="other")):
                model.saved_graph(spec)
        assert exports == ["open torchvision:resnet18", "close"]

    def test_ineffective_fusion_is_refused_before_its_proof(
        self, model: PreparedModel, conversions: dict[str, Any]
    ) -> None:
        with pytest.raises(MeasurementError, match="add-into-producer changes nothing"):
            model.saved_graph(GraphSpec(name="add-fused", fusion="add-into-producer"))
        assert conversions == {}

    def test_fusion_changes_graph(self, model: PreparedModel, conversions: dict[str, Any]) -> None:
        model.saved_graph(GraphSpec(name="pad-fused", fusion="pad-into-conv"))
        assert [*conversions] == ["pad-fused"]


class FakeSource:
    """A source model with configurable outputs."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.inputs = (SimpleNamespace(name="image"),)
        self.shape = shape
        self.preprocess = Preprocess(resize=4, crop=(4, 4))
        self.closed = False

    def run(self, feeds: object) -> dict[str, np.ndarray]:
        assert feeds == {"image": "sample"}
        return {"logits": np.zeros(self.shape, np.float32), "features": np.zeros((1, 5, 5), np.float32)}

    def close(self) -> None:
        self.closed = True


class TestPrepare:
    def prepare(self, source: FakeSource, monkeypatch: pytest.MonkeyPatch) -> PreparedModel:
        monkeypatch.setattr(module, "open_source_model", lambda _: source)
        monkeypatch.setattr(module, "synthetic_samples", lambda inputs, *_, **__: {inputs[0].name: "sample"})
        return prepare_model(story_request(), ON_CPU)

    def test_classifier(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = FakeSource((1, 37))
        model = self.prepare(source, monkeypatch)
        facts = model.describe()
        assert (facts.classes, facts.derivative) == (37, "logits:image")
        assert facts.preprocess is source.preprocess
        assert source.closed

    def test_model_without_class_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = FakeSource((1, 10, 4, 4))
        with pytest.raises(MeasurementError, match=r"needs a classifier"):
            self.prepare(source, monkeypatch)
        assert source.closed


@pytest.fixture(scope="module")
def split() -> tuple[Digits, Digits]:
    return split_digits()


class FakeWorker:
    """A process whose calls end when their results are received."""

    def __init__(self, _: object, title: str) -> None:
        self.title = title
        self.sent: list[GraphSpec] = []
        self.closed = False

    def call(self, method: str) -> str:
        assert method == "describe"
        return "facts"

    def send(self, method: str, spec: GraphSpec) -> None:
        assert method == "saved_graph"
        self.sent.append(spec)

    def receive(self) -> Path:
        (spec, *self.sent) = self.sent
        if spec.fusion:
            raise MeasurementError(f"{spec.fusion} changes nothing")
        return Path(self.title, spec.name)

    def close(self) -> None:
        self.closed = True


class TestConversions:
    @pytest.fixture
    def workers(self, monkeypatch: pytest.MonkeyPatch) -> list[FakeWorker]:
        made: list[FakeWorker] = []

        def start(*arguments: Any) -> FakeWorker:
            made.append(FakeWorker(*arguments))
            return made[-1]

        monkeypatch.setattr(module, "Worker", start)
        return made

    def test_graphs_are_converted_in_the_order_of_requests(self, workers: list[FakeWorker]) -> None:
        fused, training = GraphSpec(name="pad-fused", fusion="pad"), replace(TRAINING_GRAPH)
        with Conversions(story_request(), ON_CPU) as conversions:
            assert conversions.model == "facts"
            conversions.order([BASE, training, fused, BASE, GraphSpec(name="int8")])
            versions, exports = workers
            assert [spec.name for spec in versions.sent] == ["base", "pad-fused", "int8"]
            assert [spec.name for spec in exports.sent] == ["training"]
            for _ in range(2):
                with pytest.raises(MeasurementError, match="pad changes nothing"):
                    conversions.graph(fused)
            assert conversions.graph(BASE) == Path("conversions/base")
            assert [spec.name for spec in versions.sent] == ["int8"]
            conversions.wait()
            assert versions.sent == exports.sent == []
            assert conversions.graph(training) == Path("training graph/training")
            assert conversions.graph(GraphSpec(name="other")) == Path("conversions/other")
        assert all(worker.closed for worker in workers)

    def test_process_ends_if_the_model_cannot_be_opened(
        self, workers: list[FakeWorker], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object) -> None:
            raise ConversionError("no such model")

        monkeypatch.setattr(FakeWorker, "call", fail)
        with pytest.raises(ConversionError, match="no such model"):
            Conversions(story_request(), ON_CPU)
        assert workers[0].closed


def test_split_is_stable(split: tuple[Digits, Digits]) -> None:
    """Weights must not be evaluated on their training images."""
    digest = hashlib.sha256(np.concatenate([part.targets for part in split]).tobytes()).hexdigest()[:16]
    assert digest == "15a1a392c214df31"


def test_image_has_the_full_range_of_grays() -> None:
    image = digit_image(np.array([[0.0, 16.0], [8.0, 16.0]]), 2)
    assert np.asarray(image).tolist() == [[0, 255], [128, 255]]
    assert digit_image(np.zeros((8, 8)), 64).size == (64, 64)
