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
from graphkiln.story.preparation import PreparedModel, prepare_model
from graphkiln.story.variants import GraphSpec
from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.manifest import Conversion, Manifest, PassRecord
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.preprocess import Preprocess

BASE = GraphSpec(name="base")
FUSED = GraphSpec(name="pad-fused", fusion="pad-into-conv")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PreparedModel:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return PreparedModel(request=story_request(), preprocess=Preprocess(), classes=10, derivative="output:image")


@pytest.fixture
def exports(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record when the source is opened and closed."""
    events: list[str] = []

    @contextmanager
    def export_source(recipe: Any) -> Iterator[str]:
        events.append(f"open {recipe.source}")
        yield "exported"
        events.append("close")

    monkeypatch.setattr(module, "export_source", export_source)
    return events


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch, digits: Path, exports: list[str]) -> dict[str, Any]:
    """Record converted recipes; each version has an ineffective and an effective pass."""
    manifest = Manifest.read(digits / "1" / "manifest.json")
    assert not exports
    found: dict[str, Any] = {}

    def convert(recipe: Any, *, command: str, exported: str) -> None:
        assert (command, exported) == ("graphkiln story", "exported")
        found[recipe.name] = recipe
        version = recipe.model_store / recipe.name / "1"
        version.mkdir(parents=True)
        passes = (
            PassRecord(name="pad-into-conv", nodes_before=9, nodes_after=9 - (len(found) > 1)),
            PassRecord(name="add-into-producer", nodes_before=9, nodes_after=9),
        )
        conversion = Conversion(
            recipe={}, precision=Precision.FP32, passes=passes, output_errors={}, graph_bytes=1, seconds=1.0
        )
        replace(manifest, conversion=conversion).write(version / "manifest.json")
        (version.parent / "config.pbtxt").write_text('name: "base"\n')

    monkeypatch.setattr(module, "convert", convert)
    return found


class TestSavedGraph:
    def test_is_converted_once(self, model: PreparedModel, conversions: dict[str, Any]) -> None:
        path = model.saved_graph(BASE, ON_CPU)
        assert path == story_request().folder / "models" / "base" / "base" / "1" / "model.onnx"
        recipe = conversions.pop("base")
        assert (recipe.source, recipe.max_batch_size) == ("torchvision:resnet18", 8)
        assert model.saved_graph(BASE, ON_CPU) == path
        assert conversions == {}

    @pytest.mark.usefixtures("conversions")
    def test_source_is_exported_once(self, model: PreparedModel, exports: list[str]) -> None:
        with model:
            for spec in (BASE, replace(BASE, name="other")):
                model.saved_graph(spec, ON_CPU)
        assert exports == ["open torchvision:resnet18", "close"]

    @pytest.mark.usefixtures("conversions")
    def test_ineffective_fusion_is_refused(self, model: PreparedModel) -> None:
        for _ in range(2):  # also of a story that goes on
            with pytest.raises(MeasurementError, match="changes nothing"):
                model.saved_graph(FUSED, ON_CPU)

    @pytest.mark.usefixtures("conversions")
    def test_fusion_changes_graph(self, model: PreparedModel) -> None:
        model.saved_graph(BASE, ON_CPU)
        assert model.saved_graph(FUSED, ON_CPU).is_relative_to(story_request().folder)


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
        return prepare_model(story_request())

    def test_classifier(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = FakeSource((1, 37))
        model = self.prepare(source, monkeypatch)
        assert (model.classes, model.derivative) == (37, "logits:image")
        assert model.preprocess is source.preprocess
        assert source.closed

    def test_model_without_class_scores(self, monkeypatch: pytest.MonkeyPatch) -> None:
        source = FakeSource((1, 10, 4, 4))
        with pytest.raises(MeasurementError, match=r"needs a classifier"):
            self.prepare(source, monkeypatch)
        assert source.closed


@pytest.fixture(scope="module")
def split() -> tuple[Digits, Digits]:
    return split_digits()


def test_split_is_stable(split: tuple[Digits, Digits]) -> None:
    """Weights must not be evaluated on their training images."""
    digest = hashlib.sha256(np.concatenate([part.targets for part in split]).tobytes()).hexdigest()[:16]
    assert digest == "15a1a392c214df31"


def test_image_has_the_full_range_of_grays() -> None:
    image = digit_image(np.array([[0.0, 16.0], [8.0, 16.0]]), 2)
    assert np.asarray(image).tolist() == [[0, 255], [128, 255]]
    assert digit_image(np.zeros((8, 8)), 64).size == (64, 64)
