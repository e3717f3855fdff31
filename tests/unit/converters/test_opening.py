"""Opening a source: what the recipe adds to what the source knows, and that nothing is left open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sources import TextSource

from graphkiln_backend.graph.errors import ConversionError, ManifestError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_converters import opening
from graphkiln_converters.opening import open_model, with_dynamic_axes
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import InputSpec, SourceOptions

IDS = InputSpec(name="ids", shape=(16,), dynamic={0: (1, 64)})
IMAGE = InputSpec(name="image", shape=(3, 8, 8))
SPEC = Preprocess(mean=(0.1, 0.2, 0.3))


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> TextSource:
    made = TextSource(
        "(float[b,3,8,8] image) => (float[b,3,8,8] y) { y = Relu(image) }", (IMAGE,), preprocess=SPEC, labels=("a", "b")
    )
    monkeypatch.setattr(opening, "open_source", lambda *_: made)
    return made


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "text", "name": "m", **fields})


class TestOpening:
    def test_the_source_knows_itself(self, source: TextSource) -> None:
        with open_model(recipe()) as model:
            assert model.source is source
            assert (model.inputs, model.preprocess, model.labels) == ((IMAGE,), SPEC, ("a", "b"))
            assert source.closed == 0
        assert source.closed == 1

    @pytest.mark.usefixtures("source")
    def test_the_recipe_knows_better(self, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").write_text("x\ny\nz\n")
        fields = {"preprocess": {"resize": 9}, "labels": tmp_path / "labels.txt", "dynamic": ["image:2=8..16"]}
        with open_model(recipe(**fields)) as model:
            assert model.preprocess == Preprocess(resize=9)
            assert model.labels == ("x", "y", "z")
            assert model.inputs[0].dynamic == {1: (8, 16)}

    @pytest.mark.usefixtures("source")
    def test_feature_maps_have_no_labels(self) -> None:
        with open_model(recipe(features_only=True)) as model:
            assert model.labels == ()

    def test_what_the_recipe_says_of_the_source_reaches_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[object] = []

        def open_source(*arguments: object) -> TextSource:
            seen.extend(arguments)
            return TextSource("", ())

        monkeypatch.setattr(opening, "open_source", open_source)
        open_model(recipe(weights="w.pth", pretrained=True, features_only=True, out_indices=[1], shape=["a=3x4"]))
        assert seen == [
            "text",
            SourceOptions(
                weights=Path("w.pth"), pretrained=True, features_only=True, out_indices=(1,), shapes={"a": (3, 4)}
            ),
        ]

    @pytest.mark.parametrize(
        ("fields", "error", "words"),
        [
            ({"labels": "missing.txt"}, ConversionError, r"cannot read labels from missing\.txt"),
            ({"preprocess": {"resized": 8}}, ManifestError, r"preprocess.*resized"),
            ({"preprocess": {"mean": [0.5]}}, ManifestError, "must have 3 values"),
            ({"dynamic": ["text:1=1..2"]}, ConversionError, "there is no input 'text'"),
        ],
    )
    def test_a_mistake_leaves_nothing_open(
        self, source: TextSource, fields: dict[str, Any], error: type[Exception], words: str
    ) -> None:
        with pytest.raises(error, match=words):
            open_model(recipe(**fields))
        assert source.closed == 1

    def test_labels_that_are_no_text(self, source: TextSource, tmp_path: Path) -> None:
        (tmp_path / "labels.txt").write_bytes(b"caf\xe9")
        with pytest.raises(ConversionError, match="cannot read labels"):
            open_model(recipe(labels=tmp_path / "labels.txt"))
        assert source.closed == 1


class TestDynamicAxes:
    def test_none_are_requested(self) -> None:
        assert with_dynamic_axes((IDS, IMAGE), {}) == (IDS, IMAGE)

    def test_are_counted_with_the_batch_by_users_and_without_it_inside(self) -> None:
        ids, image = with_dynamic_axes((IDS, IMAGE), {"image": {2: (4, 8), 3: (5, 9)}})
        assert ids == IDS
        assert image.dynamic == {1: (4, 8), 2: (5, 9)}

    def test_a_range_of_the_source_is_replaced(self) -> None:
        (ids,) = with_dynamic_axes((IDS,), {"ids": {1: (8, 512)}})
        assert ids.dynamic == {0: (8, 512)}
        assert IDS.dynamic == {0: (1, 64)}, "the source's own is not changed"

    @pytest.mark.parametrize(("axis", "ends"), [(0, (1, 2)), (4, (1, 2)), (2, (0, 2)), (2, (3, 2))])
    def test_what_does_not_fit(self, axis: int, ends: tuple[int, int]) -> None:
        with pytest.raises(ConversionError, match=r"does not fit image \[batch, 3, 8, 8\]") as caught:
            with_dynamic_axes((IDS, IMAGE), {"image": {axis: ends}})
        assert "axis 0 is the batch" in caught.value.hint

    def test_an_unknown_input_lists_those_there_are(self) -> None:
        with pytest.raises(ConversionError, match="there is no input 'mask'") as caught:
            with_dynamic_axes((IDS, IMAGE), {"mask": {1: (1, 2)}})
        assert caught.value.hint == "inputs: ids, image"
