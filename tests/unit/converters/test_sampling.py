"""Samples of a graph: what it is fed, and what its source returns for that."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import compute, draw
from PIL import Image
from sources import TextSource

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge import Edge
from graphkiln_backend.passes.pipeline import edge_passes
from graphkiln_converters.opening import OpenModel, open_model
from graphkiln_converters.publishing import remaining_preprocess
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sampling import Sampler, recorded_samples
from graphkiln_converters.sources.base import InputSpec

IMAGE = InputSpec(name="image", shape=(3, 8, 8))
TEXT = """(float[b,3,h,w] image) => (float[b,3] y, float[b,3,h,w] map) {
    map = Relu(image)
    p = GlobalAveragePool(map)
    y = Flatten(p)
}"""
SPEC = Preprocess(resize=8, crop=(8, 8), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "text", "name": "m", **fields})


def opened(source: TextSource, labels: tuple[str, ...] = ()) -> OpenModel:
    return OpenModel(source=source, inputs=source.inputs, preprocess=source.preprocess, labels=labels)


def sampler(source: TextSource, **options: Any) -> tuple[Sampler, Any]:
    """A sampler of the rewritten graph, and the graph."""
    model = source.graph()
    edge = run_passes(model, edge_passes(model, **options)).edge
    opened_model = opened(source)
    made = Sampler(model=opened_model, edge=edge, preprocess=remaining_preprocess(opened_model, edge))
    return made, model


def check(made: Any, model: Any) -> None:
    """The graph returns for the feeds what the samples say."""
    for sample in made:
        found = compute(model, **sample.feeds)
        assert list(found) == list(sample.outputs)
        for name, array in sample.outputs.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=1e-5)


class TestSynthetic:
    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"keep_names": True},
            {"softmax": True, "top_k": 2},
            {"nhwc": True},
            {"outputs": ("y",)},
            {"preprocess": SPEC},
            {"preprocess": SPEC, "nhwc": True, "top_k": 1},
        ],
        ids=["names", "own names", "best", "nhwc", "pruned", "bytes", "all"],
    )
    @pytest.mark.parametrize("dynamic", [{}, {1: (4, 12), 2: (2, 16)}], ids=["fixed", "dynamic"])
    def test_of_every_edge_and_size(self, options: dict[str, Any], dynamic: dict[int, tuple[int, int]]) -> None:
        image = InputSpec(name="image", shape=(3, 8, 8), dynamic=dynamic)
        made, model = sampler(TextSource(TEXT, (image,), preprocess=SPEC), **options)
        samples = made.samples(recipe())
        assert len(samples) == (3 if dynamic else 1)
        check(samples, model)

    def test_sizes_are_the_usual_the_smallest_and_the_largest(self) -> None:
        image = InputSpec(name="image", shape=(3, 8, 8), dynamic={1: (4, 12), 2: (2, 16)})
        made, _ = sampler(TextSource(TEXT, (image,)))
        shapes = [sample.feeds["INPUT_0"].shape for sample in made.samples(recipe())]
        assert shapes == [(6, 3, 8, 8), (6, 3, 4, 2), (6, 3, 12, 16)]

    def test_images_where_the_preprocessing_is_known(self) -> None:
        made, _ = sampler(TextSource(TEXT, (IMAGE,), preprocess=SPEC), preprocess=SPEC)
        feeds = made.samples(recipe())[0].feeds["INPUT_0"]
        assert (feeds.dtype, feeds.shape) == (np.uint8, (6, 8, 8, 3))
        noise, _ = sampler(TextSource(TEXT, (IMAGE,)))
        assert noise.samples(recipe())[0].feeds["INPUT_0"].min() < -1

    def test_are_the_same_each_time_and_differ_by_size(self) -> None:
        image = InputSpec(name="image", shape=(3, 8, 8), dynamic={1: (8, 8)})
        made, _ = sampler(TextSource(TEXT, (image,)))
        first, again = made.samples(recipe()), made.samples(recipe())
        np.testing.assert_array_equal(first[1].feeds["INPUT_0"], again[1].feeds["INPUT_0"])
        assert (first[1].feeds["INPUT_0"] != first[2].feeds["INPUT_0"]).any()

    def test_the_source_runs_in_small_batches(self) -> None:
        source = TextSource(TEXT, (IMAGE,))
        made, _ = sampler(source)
        made.samples(recipe())
        assert source.rows == [4, 2]

    def test_a_pruned_output_needs_no_batch(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y, float total) { y = Relu(x) total = ReduceSum<keepdims=0>(x) }"
        source = TextSource(text, (InputSpec(name="x", shape=(3,)),))
        made, model = sampler(source, outputs=("y",))
        check(made.samples(recipe()), model)
        whole, _ = sampler(source)
        with pytest.raises(ConversionError, match="output 'total' has the shape"):
            whole.samples(recipe())

    def test_text_is_made_too(self) -> None:
        text = "(string[batch,2] words) => (string[batch,2] same) { same = Identity(words) }"
        model = opened(TextSource(text, (InputSpec(name="words", shape=(2,), dtype=DType.BYTES),)))
        (sample,) = Sampler(model=model, edge=Edge(), preprocess=None).samples(recipe())
        assert sample.feeds["words"].dtype == object


class TestOwnNames:
    @pytest.mark.parametrize("options", [{}, {"nhwc": True}, {"preprocess": SPEC}], ids=["names", "nhwc", "bytes"])
    def test_by_the_sources_names_are_what_the_source_takes(self, tmp_path: Path, options: dict[str, Any]) -> None:
        made, model = sampler(TextSource(TEXT, (IMAGE,), preprocess=SPEC), **options)
        images = np.random.default_rng(0).standard_normal((5, 3, 8, 8)).astype(np.float32)
        np.savez(tmp_path / "own.npz", image=images)
        (sample,) = made.samples(recipe(samples=tmp_path / "own.npz"))
        if not options:
            np.testing.assert_array_equal(sample.feeds["INPUT_0"], images)
        check([sample], model)


class GradientTextSource(TextSource):
    """Its second output stands for a gradient."""

    gradient = "map"

    def gradient_noise(self, feeds: dict[str, AnyArray]) -> float:
        assert list(feeds) == ["image"], "by the source's own names"
        return 0.25


class TestGradients:
    def test_are_known_by_the_graphs_name(self) -> None:
        made, _ = sampler(GradientTextSource(TEXT, (IMAGE,)))
        (sample,) = made.samples(recipe())
        assert (sample.gradients, sample.gradient_noise) == ({"OUTPUT_1"}, 0.25)

    def test_others_have_none(self) -> None:
        made, _ = sampler(TextSource(TEXT, (IMAGE,)))
        (sample,) = made.samples(recipe())
        assert (sample.gradients, sample.gradient_noise) == (frozenset(), 0.0)


def test_samples_say_what_is_read_from_them_by_the_graphs_names(tmp_path: Path) -> None:
    source = TextSource(TEXT, (IMAGE,))
    made, _ = sampler(source)
    knowing = Sampler(model=replace(made.model, task=Segmentation(scores="map")), edge=made.edge, preprocess=None)
    (sample,) = knowing.samples(recipe())
    assert sample.task == Segmentation(scores="OUTPUT_1")
    image = draw(2, 3, 8, 8)
    np.savez(tmp_path / "r.npz", image=image, **compute(source.graph(), image=image))
    (recorded,) = recorded_samples(
        recipe(reference=tmp_path / "r.npz"), [IMAGE], ["y", "map"], task=Segmentation(scores="map")
    )
    assert recorded.at(made.edge).task == sample.task


class TestOwn:
    def folder(self, path: Path) -> Path:
        for label, seed in (("cat", 1), ("dog", 2), ("cat", 3)):
            (path / label).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(seed).integers(0, 256, (10, 12, 3), np.uint8)
            Image.fromarray(pixels).save(path / label / f"{seed}.png")
        return path

    def test_arrays_are_those_of_the_graph(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", INPUT_0=draw(9, 3, 8, 8))
        made, model = sampler(TextSource(TEXT, (IMAGE,)))
        (sample,) = made.samples(recipe(samples=tmp_path / "s.npz"))
        np.testing.assert_array_equal(sample.feeds["INPUT_0"], draw(9, 3, 8, 8))
        check([sample], model)

    @pytest.mark.parametrize("embedded", [True, False])
    def test_images_with_their_classes(self, tmp_path: Path, embedded: bool) -> None:
        source = TextSource(TEXT, (IMAGE,), preprocess=SPEC)
        made, model = sampler(source, **({"preprocess": SPEC} if embedded else {}))
        known = Sampler(model=opened(source, ("cat", "dog")), edge=made.edge, preprocess=made.preprocess)
        (sample,) = known.samples(recipe(samples=self.folder(tmp_path)))
        np.testing.assert_array_equal(sample.targets, [0, 0, 1])  # type: ignore[arg-type]
        assert sample.feeds["INPUT_0"].dtype == (np.uint8 if embedded else np.float32)
        check([sample], model)

    def test_the_further_sizes_are_synthetic(self, tmp_path: Path) -> None:
        image = InputSpec(name="image", shape=(3, 8, 8), dynamic={1: (4, 12)})
        np.savez(tmp_path / "s.npz", INPUT_0=draw(9, 3, 8, 8))
        made, _ = sampler(TextSource(TEXT, (image,)))
        samples = made.samples(recipe(samples=tmp_path / "s.npz"))
        assert [len(sample.feeds["INPUT_0"]) for sample in samples] == [9, 6, 6]
        assert samples[1].targets is None


class TestCalibration:
    def test_is_read_by_the_graphs_names(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "c.npz", INPUT_0=draw(5, 3, 8, 8), more=draw(2))
        made, _ = sampler(TextSource(TEXT, (IMAGE,)))
        assert list(made.calibration(recipe(calibration=tmp_path / "c.npz"))) == ["INPUT_0"]

    def test_must_be_given(self) -> None:
        made, _ = sampler(TextSource(TEXT, (IMAGE,)))
        with pytest.raises(ConversionError, match="needs samples to calibrate on") as caught:
            made.calibration(recipe())
        assert "--calibration" in caught.value.hint

    def test_must_not_be_the_samples_of_the_proof(self, tmp_path: Path) -> None:
        """Also by another name."""
        np.savez(tmp_path / "c.npz", INPUT_0=draw(5, 3, 8, 8))
        (tmp_path / "link.npz").symlink_to(tmp_path / "c.npz")
        made, _ = sampler(TextSource(TEXT, (IMAGE,)))
        for name in ("c.npz", "link.npz"):
            with pytest.raises(ConversionError, match="proves nothing"):
                made.calibration(recipe(calibration=tmp_path / "c.npz", samples=tmp_path / name))


class TestRecorded:
    def test_none_without_a_file(self) -> None:
        assert recorded_samples(recipe(), (IMAGE,), ["y"]) == []

    @pytest.mark.parametrize("options", [{}, {"nhwc": True}, {"softmax": True, "top_k": 2}, {"outputs": ("map",)}])
    def test_go_through_the_edge_as_the_graph_does(self, tmp_path: Path, options: dict[str, Any]) -> None:
        source, image = TextSource(TEXT, (IMAGE,)), draw(4, 3, 8, 8)
        outputs = source.run({"image": image})
        np.savez(tmp_path / "r.npz", image=image, **outputs)
        made, model = sampler(source, **options)
        (recorded,) = recorded_samples(recipe(reference=tmp_path / "r.npz"), (IMAGE,), ["y", "map"])
        np.testing.assert_array_equal(recorded.feeds["image"], image)
        check([recorded.at(made.edge)], model)

    @pytest.mark.parametrize("fields", [{"gradient": "y:image"}, {"input": "uint8-nhwc"}])
    def test_are_of_the_source_as_it_is(self, tmp_path: Path, fields: dict[str, str]) -> None:
        with pytest.raises(ConversionError, match="--reference holds inputs and outputs of the source"):
            recorded_samples(recipe(reference=tmp_path / "r.npz", **fields), (IMAGE,), ["y"])


def test_inputs_are_known_by_the_graphs_names() -> None:
    made, _ = sampler(TextSource(TEXT, (IMAGE,)))
    assert made.inputs == {"INPUT_0": IMAGE}


def test_of_an_onnx_file(digits: Path) -> None:
    """The committed example, through the real opening."""
    with open_model(recipe(source=str(digits / "1" / "model.onnx"))) as model:
        (sample,) = Sampler(model=model, edge=Edge(), preprocess=model.preprocess).samples(recipe())
    assert {name: len(array) for name, array in sample.feeds.items()} == {"INPUT_0": 6}


class Precise(TextSource):
    def run_in_fp64(self, feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return {name: array.astype("f8") * 1.5 for name, array in self.run(feeds).items()}


def test_samples_beside_fp64_keep_their_types() -> None:
    made, _ = sampler(Precise(TEXT, (IMAGE,)))
    samples = made.samples(recipe())
    precise, noise = made.beside_fp64(samples)
    assert noise == pytest.approx(1 / 3, rel=1e-5)
    for sample, exact in zip(samples, precise, strict=True):
        for name, array in sample.outputs.items():
            assert exact.outputs[name].dtype == array.dtype
            np.testing.assert_allclose(exact.outputs[name], array * 1.5, rtol=1e-6)


def test_a_source_without_fp64_has_none() -> None:
    made, _ = sampler(TextSource(TEXT, (IMAGE,)))
    assert made.beside_fp64(made.samples(recipe())) == ([], 0.0)
