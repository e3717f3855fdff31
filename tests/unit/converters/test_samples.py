"""Samples for the proof: read from files, or synthetic."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from graphs import compute, draw
from PIL import Image
from recorded import write_record
from sources import TextSource

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ConversionError, InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Segmentation
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.pipeline import edge_passes
from graphkiln_converters.convert import remaining_preprocess
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.samples import (
    Sampler,
    read_reference,
    read_samples,
    read_targets,
    recorded_samples,
    synthetic_images,
    with_index_ranges,
)
from graphkiln_converters.sources.base import InputSpec

IMAGE = {"INPUT_0": InputSpec(name="image", shape=(3, 8, 8))}
SPEC = Preprocess(resize=8, crop=(8, 8), mean=(0.1, 0.2, 0.3))


def save_images(folder: Path, *names: str) -> Path:
    for seed, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pixels = np.random.default_rng(seed).integers(0, 256, (9, 10, 3), np.uint8)
        Image.fromarray(pixels).save(folder / name)
    return folder


def values(*names: str) -> list[onnx_ir.Value]:
    return [onnx_ir.val(name) for name in names]


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


class TestRecord:
    """Requests of `serve --record`."""

    def record(self, folder: Path, *arrays: AnyArray, **options: Any) -> Path:
        write_record(folder, [({"x": array}, {}) for array in arrays], **options)
        return folder

    def read(self, path: Path, *shape: int, most: int = 256) -> AnyArray:
        return read_samples(path, {"x": InputSpec(name="source", shape=shape)}, SPEC, most)["x"]

    def test_rows_of_requests(self, tmp_path: Path) -> None:
        path = self.record(tmp_path, draw(1, 3), draw(2, 3), draw(1, 3))
        for place in (path, path / "m", next((path / "m").iterdir())):
            assert self.read(place, 3).shape == (4, 3)
        np.testing.assert_array_equal(self.read(path, 3)[:1], draw(1, 3))

    def test_whole_tensors(self, tmp_path: Path) -> None:
        assert self.read(self.record(tmp_path, draw(2, 3), draw(2, 3)), 2, 3).shape == (2, 2, 3)

    def test_evenly_spread_requests(self, tmp_path: Path) -> None:
        path = self.record(tmp_path, *(np.full((4, 1), number, np.float32) for number in range(100)))
        assert self.read(path, 1, most=5).ravel().tolist() == [0, 25, 50, 74, 99]

    def test_text(self, tmp_path: Path) -> None:
        path = self.record(tmp_path, np.array([["a"], ["b"]], np.object_))
        inputs = {"x": InputSpec(name="x", shape=(1,), dtype=DType.BYTES)}
        assert read_samples(path, inputs, None, 9)["x"].tolist() == [["a"], ["b"]]

    def test_most_frequent_shape(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        path = self.record(tmp_path, draw(1, 4), draw(1, 3), draw(1, 3))
        assert self.read(path, 3).shape == (2, 3)
        assert "1 of 3 requests have other shapes" in caplog.text

    def test_several_models(self, tmp_path: Path) -> None:
        self.record(tmp_path, draw(1, 3), model="a")
        path = self.record(tmp_path, draw(1, 3), model="b")
        with pytest.raises(ConversionError, match="name one of its folders: a, b"):
            self.read(path, 3)

    def test_digests(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="only digests"):
            self.read(self.record(tmp_path, draw(1, 3), inputs="digest"), 3)

    def test_other_inputs(self, tmp_path: Path) -> None:
        path = self.record(tmp_path, draw(1, 3))
        with pytest.raises(ConversionError, match="lack input z"):
            read_samples(path, {"z": InputSpec(name="z", shape=(3,))}, None, 9)

    def test_no_classes(self, tmp_path: Path) -> None:
        assert read_targets(self.record(tmp_path, draw(1, 3)), ("a", "b"), 9) is None


class TestSyntheticImages:
    def test_images_are_smooth_and_differ(self) -> None:
        """Neighbors are alike, as in photographs: noise alone would not show errors of half a pixel."""
        images = synthetic_images((64, 64, 3), 4).astype(float)
        blocks = images.reshape(4, 8, 8, 8, 8, 3).mean(axis=(2, 4))
        assert blocks.std() > 0.4 * images.std(), "an eighth, if it were noise"
        assert len({image.tobytes() for image in images}) == 4


class TestArrays:
    def test_names_of_the_source_are_accepted(self, tmp_path: Path) -> None:
        path = save(tmp_path / "s.npz", image=draw(4, 3, 8, 8))
        inputs = {"INPUT_0": InputSpec(name="image", shape=(3, 8, 8))}
        assert list(read_samples(path, inputs, None, 256)) == ["image"]
        path = save(tmp_path / "t.npz", pixels=draw(4, 3, 8, 8))
        with pytest.raises(ConversionError, match=r"lack input INPUT_0 .*the source's names are also accepted: image"):
            read_samples(path, inputs, None, 256)

    def test_arrays_by_number_are_accepted(self, tmp_path: Path) -> None:
        path = save(tmp_path / "s.npz", INPUT_1=draw(4, 3), INPUT_0=draw(4, 2))
        inputs = {name: InputSpec(name=name, shape=shape) for name, shape in (("ids", (2,)), ("mask", (3,)))}
        found = read_samples(path, inputs, None, 256)
        assert {name: array.shape for name, array in found.items()} == {"ids": (4, 2), "mask": (4, 3)}

    def test_numbers_that_are_names_are_no_numbers(self, tmp_path: Path) -> None:
        """`INPUT_1` is the first input: by number it would be the second."""
        path = save(tmp_path / "s.npz", INPUT_0=draw(4, 3), INPUT_1=draw(4, 3))
        inputs = {name: InputSpec(name=name, shape=(3,)) for name in ("INPUT_1", "mask")}
        with pytest.raises(ConversionError, match="lack input mask"):
            read_samples(path, inputs, None, 256)
        with pytest.raises(ConversionError, match="lacks 'mask'"):
            read_reference(path, tuple(inputs.values()), [])

    def test_of_many_samples_evenly_spread_ones_are_read(self, tmp_path: Path) -> None:
        rows = np.arange(100, dtype=np.float32)[:, np.newaxis]
        path = save(tmp_path / "s.npz", x=rows)
        found = read_samples(path, {"x": InputSpec(name="x", shape=(1,))}, None, 5)["x"].ravel()
        np.testing.assert_array_equal(found, [0, 25, 50, 74, 99])

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ({"other": np.zeros(3)}, "lack input INPUT_0.*it has other"),
            ({"INPUT_0": np.zeros((0, 3, 8, 8), np.float32)}, "has no sample"),
        ],
    )
    def test_samples_that_do_not_match_are_refused(self, tmp_path: Path, content: dict[str, Any], words: str) -> None:
        with pytest.raises(ConversionError, match=words):
            read_samples(save(tmp_path / "s.npz", **content), IMAGE, None, 256)

    def test_unreadable_files_are_refused(self, tmp_path: Path) -> None:
        np.save(tmp_path / "one.npy", draw(3))
        (tmp_path / "text.npz").write_text("no arrays")
        whole = save(tmp_path / "whole.npz", INPUT_0=draw(4, 3, 8, 8)).read_bytes()
        (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
        np.savez_compressed(tmp_path / "damaged.npz", INPUT_0=draw(4, 3, 8, 8))
        packed = bytearray((tmp_path / "damaged.npz").read_bytes())
        packed[100:200] = bytes(100)
        (tmp_path / "damaged.npz").write_bytes(packed)
        np.savez(tmp_path / "objects.npz", INPUT_0=np.array([{"a": 1}], object))
        np.savez(tmp_path / "latin.npz", INPUT_0=np.array([b"gr\xf6\xdfe"]))
        for name, words in [
            ("one.npy", "one array without a name"),
            ("text.npz", "cannot read samples"),
            ("cut.npz", "cannot read samples"),
            ("damaged.npz", "cannot read samples"),
            ("objects.npz", "cannot read samples"),
            ("latin.npz", "its text is not UTF-8"),
            ("missing.npz", "cannot read samples"),
        ]:
            with pytest.raises(ConversionError, match=words):
                read_samples(tmp_path / name, IMAGE, None, 256)


class TestImages:
    def test_images_are_decoded_by_the_spec_in_the_order_of_their_paths(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, "b.png", "a/c.png", "a/b.png")
        found = read_samples(folder, IMAGE, SPEC, 256)["INPUT_0"]
        expected = [load_sample(folder / name, SPEC) for name in ("a/b.png", "a/c.png", "b.png")]
        np.testing.assert_array_equal(found, np.stack(expected))

    def test_images_of_several_sizes_are_refused_by_name(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, "a.png", "b.png")
        Image.new("RGB", (30, 11)).save(folder / "c.png")
        with pytest.raises(ConversionError, match=r"c\.png becomes \[3, 11, 30\], .*a\.png \[3, ") as caught:
            read_samples(folder, IMAGE, Preprocess(), 256)
        assert "--preprocess" in caught.value.hint

    def test_files_of_other_formats_are_left_out_with_a_warning(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        folder = save_images(tmp_path, "a.png")
        for name in ("b.HEIC", "c.avif"):
            (folder / name).touch()
        assert len(read_samples(folder, IMAGE, SPEC, 256)["INPUT_0"]) == 1
        assert f"left out 2 files, such as {folder / 'b.HEIC'}, of other formats" in caplog.text
        (folder / "a.png").unlink()
        with pytest.raises(ConversionError, match=r"holds 2 files, such as .*b\.HEIC, of other formats"):
            read_samples(folder, IMAGE, SPEC, 256)

    @pytest.mark.parametrize("damage", [b"no image", "gone"])
    def test_an_unreadable_image_is_named(self, tmp_path: Path, damage: bytes | str) -> None:
        folder = save_images(tmp_path, "a.png", "c.png")
        if isinstance(damage, str):
            (folder / "b.png").symlink_to(folder / damage)
        else:
            (folder / "b.png").write_bytes(damage)
        with pytest.raises(InvalidInput, match=r"b\.png"):
            read_samples(folder, IMAGE, SPEC, 256)

    @pytest.mark.parametrize(
        ("specs", "preprocess"),
        [(IMAGE, None), ({**IMAGE, "INPUT_1": InputSpec(name="b", shape=(3, 8, 8))}, SPEC)],
        ids=["no spec", "two inputs"],
    )
    def test_images_need_one_input_and_a_spec(
        self, tmp_path: Path, specs: dict[str, InputSpec], preprocess: Preprocess | None
    ) -> None:
        with pytest.raises(ConversionError, match="one image input"):
            read_samples(save_images(tmp_path, "a.png"), specs, preprocess, 256)


class TestTargets:
    def test_classes_are_the_names_of_folders(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, "dog/1.png", "cat/1.png", "cat/2.png")
        found = read_targets(folder, ["cat", "dog"], 256)
        np.testing.assert_array_equal(found, [0, 0, 1])  # type: ignore[arg-type]

    @pytest.mark.parametrize(("labels", "warned"), [(["Cat", "dog"], True), (["mouse"], False)])
    def test_folders_that_are_partly_labels_are_warned_about(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, labels: list[str], warned: bool
    ) -> None:
        assert read_targets(save_images(tmp_path, "cat/1.png", "dog/1.png"), labels, 256) is None
        assert ("is not one of the labels" in caplog.text) == warned


RECORDED = {"a": draw(3, 2), "b": np.arange(3), "y": draw(3, 5)}


class TestReference:
    SPECS = (InputSpec(name="a", shape=(2,)), InputSpec(name="b", shape=(), dtype=DType.INT64))

    @pytest.mark.parametrize("names", [("a", "b", "y"), ("INPUT_0", "INPUT_1", "OUTPUT_0"), ("a", "INPUT_1", "y")])
    def test_arrays_by_the_names_of_the_source_or_by_number(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        path = save(tmp_path / "r.npz", **dict(zip(names, RECORDED.values(), strict=True)))
        feeds, outputs = read_reference(path, self.SPECS, ["y"])
        assert (list(feeds), list(outputs)) == (["a", "b"], ["y"])
        np.testing.assert_array_equal(outputs["y"], RECORDED["y"])

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"b": None}, "lacks 'b'.*it has a, y"),
            ({"a": np.zeros((3, 2))}, r"input 'a' is float64 \[3, 2\], expected FP32 \[samples, 2\]"),
            ({"y": draw(4, 5)}, "the same number of samples.*y 4"),
            ({"y": np.float32(1)}, "y 0"),
            ({"a": np.zeros((0, 2), "f4"), "b": np.arange(0), "y": np.zeros((0, 5), "f4")}, "at least one"),
        ],
    )
    def test_samples_that_do_not_match_are_refused(self, tmp_path: Path, change: dict[str, Any], words: str) -> None:
        arrays = {name: array for name, array in {**RECORDED, **change}.items() if array is not None}
        with pytest.raises(ConversionError, match=words):
            read_reference(save(tmp_path / "r.npz", **arrays), self.SPECS, ["y"])


# Samples of a graph: its inputs, and the outputs of its source.

PICTURE = InputSpec(name="image", shape=(3, 8, 8))
TEXT = """(float[b,3,h,w] image) => (float[b,3] y, float[b,3,h,w] map) {
    map = Relu(image)
    p = GlobalAveragePool(map)
    y = Flatten(p)
}"""
PIXELS = Preprocess(resize=8, crop=(8, 8), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def recipe(**fields: Any) -> Recipe:
    return Recipe.model_validate({"source": "text", "name": "m", **fields})


def sampler(source: TextSource, **options: Any) -> tuple[Sampler, Any]:
    """A sampler of the rewritten graph, and the graph."""
    model = source.graph()
    edge = run_passes(model, edge_passes(model, **options)).edge
    made = Sampler(model=source, edge=edge, preprocess=remaining_preprocess(source, edge))
    return made, model


def check(made: Any, model: Any) -> None:
    """Compare the outputs of the graph with those of the samples."""
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
            {"preprocess": PIXELS},
            {"preprocess": PIXELS, "nhwc": True, "top_k": 1},
        ],
        ids=["names", "own names", "best", "nhwc", "pruned", "bytes", "all"],
    )
    @pytest.mark.parametrize("dynamic", [{}, {1: (4, 12), 2: (2, 16)}], ids=["fixed", "dynamic"])
    def test_samples_of_every_edge_and_size_match_the_graph(
        self, options: dict[str, Any], dynamic: dict[int, tuple[int, int]]
    ) -> None:
        image = InputSpec(name="image", shape=(3, 8, 8), dynamic=dynamic)
        made, model = sampler(TextSource.of(TEXT, (image,), preprocess=PIXELS), **options)
        samples = made.samples(recipe())
        assert len(samples) == (3 if dynamic else 1)
        check(samples, model)

    def test_samples_are_images_if_the_preprocessing_is_known(self) -> None:
        made, _ = sampler(TextSource.of(TEXT, (PICTURE,), preprocess=PIXELS), preprocess=PIXELS)
        feeds = made.samples(recipe())[0].feeds["INPUT_0"]
        assert (feeds.dtype, feeds.shape) == (np.uint8, (6, 8, 8, 3))
        noise, _ = sampler(TextSource.of(TEXT, (PICTURE,)))
        assert noise.samples(recipe())[0].feeds["INPUT_0"].min() < -1

    def test_a_removed_output_needs_no_batch(self) -> None:
        text = "(float[b,3] x) => (float[b,3] y, float total) { y = Relu(x) total = ReduceSum<keepdims=0>(x) }"
        source = TextSource.of(text, (InputSpec(name="x", shape=(3,)),))
        made, model = sampler(source, outputs=("y",))
        check(made.samples(recipe()), model)
        whole, _ = sampler(source)
        with pytest.raises(ConversionError, match="output 'total' has the shape"):
            whole.samples(recipe())


class TestOwnNames:
    @pytest.mark.parametrize("options", [{}, {"nhwc": True}, {"preprocess": PIXELS}], ids=["names", "nhwc", "bytes"])
    def test_samples_by_the_names_of_the_source_are_inputs_of_the_source(
        self, tmp_path: Path, options: dict[str, Any]
    ) -> None:
        made, model = sampler(TextSource.of(TEXT, (PICTURE,), preprocess=PIXELS), **options)
        images = np.random.default_rng(0).standard_normal((5, 3, 8, 8)).astype(np.float32)
        np.savez(tmp_path / "own.npz", image=images)
        (sample,) = made.samples(recipe(samples=tmp_path / "own.npz"))
        if not options:
            np.testing.assert_array_equal(sample.feeds["INPUT_0"], images)
        check([sample], model)


def test_samples_have_the_task_with_the_names_of_the_graph(tmp_path: Path) -> None:
    source = TextSource.of(TEXT, (PICTURE,))
    made, _ = sampler(source)
    knowing = Sampler(model=replace(made.model, task=Segmentation(scores="map")), edge=made.edge, preprocess=None)
    (sample,) = knowing.samples(recipe())
    assert sample.task == Segmentation(scores="OUTPUT_1")
    image = draw(2, 3, 8, 8)
    np.savez(tmp_path / "r.npz", image=image, **compute(source.graph(), image=image))
    (recorded,) = recorded_samples(recipe(reference=tmp_path / "r.npz"), knowing.model, values("y", "map"))
    assert recorded.at(made.edge).task == sample.task


class TestOwn:
    def folder(self, path: Path) -> Path:
        for label, seed in (("cat", 1), ("dog", 2), ("cat", 3)):
            (path / label).mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(seed).integers(0, 256, (10, 12, 3), np.uint8)
            Image.fromarray(pixels).save(path / label / f"{seed}.png")
        return path

    @pytest.mark.parametrize("embedded", [True, False])
    def test_images_with_their_classes(self, tmp_path: Path, embedded: bool) -> None:
        source = TextSource.of(TEXT, (PICTURE,), preprocess=PIXELS)
        made, model = sampler(source, **({"preprocess": PIXELS} if embedded else {}))
        known = Sampler(model=replace(source, labels=("cat", "dog")), edge=made.edge, preprocess=made.preprocess)
        (sample,) = known.samples(recipe(samples=self.folder(tmp_path)))
        np.testing.assert_array_equal(sample.targets, [0, 0, 1])  # type: ignore[arg-type]
        assert sample.feeds["INPUT_0"].dtype == (np.uint8 if embedded else np.float32)
        check([sample], model)

    def test_samples_of_other_sizes_are_synthetic(self, tmp_path: Path) -> None:
        image = InputSpec(name="image", shape=(3, 8, 8), dynamic={1: (4, 12)})
        np.savez(tmp_path / "s.npz", INPUT_0=draw(9, 3, 8, 8))
        made, _ = sampler(TextSource.of(TEXT, (image,)))
        samples = made.samples(recipe(samples=tmp_path / "s.npz"))
        assert [len(sample.feeds["INPUT_0"]) for sample in samples] == [9, 6, 6]
        assert samples[1].targets is None


class TestRecorded:
    @pytest.mark.parametrize("options", [{}, {"nhwc": True}, {"softmax": True, "top_k": 2}, {"outputs": ("map",)}])
    def test_recorded_outputs_are_converted_like_the_graph(self, tmp_path: Path, options: dict[str, Any]) -> None:
        source, image = TextSource.of(TEXT, (PICTURE,)), draw(4, 3, 8, 8)
        outputs = source.run({"image": image})
        np.savez(tmp_path / "r.npz", image=image, **outputs)
        made, model = sampler(source, **options)
        (recorded,) = recorded_samples(recipe(reference=tmp_path / "r.npz"), source, values("y", "map"))
        np.testing.assert_array_equal(recorded.feeds["image"], image)
        check([recorded.at(made.edge)], model)

    def test_answers_of_a_library_are_those_of_its_graph(self, tmp_path: Path) -> None:
        np.savez(tmp_path / "r.npz", image=draw(4, 3, 8, 8), y=np.arange(4.0), map=np.arange(4, dtype=np.int32))
        outputs = [
            onnx_ir.val("y", dtype=onnx_ir.DataType.FLOAT, shape=("batch", 1)),
            onnx_ir.val("map", dtype=onnx_ir.DataType.INT64, shape=("batch",)),
        ]
        source = TextSource.of(TEXT, (PICTURE,))
        (recorded,) = recorded_samples(recipe(reference=tmp_path / "r.npz"), source, outputs)
        shapes = {name: (array.dtype, array.shape) for name, array in recorded.outputs.items()}
        assert shapes == {"y": (np.float32, (4, 1)), "map": (np.int64, (4,))}

    @pytest.mark.parametrize("fields", [{"gradient": "y:image"}, {"input": "uint8-nhwc"}])
    def test_recorded_outputs_of_a_changed_source_are_refused(self, tmp_path: Path, fields: dict[str, str]) -> None:
        with pytest.raises(ConversionError, match="--reference has inputs and outputs of the unchanged source"):
            recorded_samples(
                recipe(reference=tmp_path / "r.npz", **fields), TextSource.of(TEXT, (PICTURE,)), values("y")
            )


class Precise(TextSource):
    def run_in_fp64(self, feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
        return {name: array.astype("f8") * 1.5 for name, array in self.run(feeds).items()}


def test_source_is_run_once_for_several_graphs() -> None:
    runs: list[int] = []

    class Counted(TextSource):
        reference_batch = 2  # several batches of one shape

        def run(self, feeds: dict[str, AnyArray]) -> dict[str, AnyArray]:
            runs.append(len(feeds["image"]))
            return super().run(feeds)

    source, answers = Counted.of(TEXT, (PICTURE,)), {}
    first, graph = sampler(source)
    other, ranked = sampler(source, softmax=True, top_k=2)
    check(replace(first, answers=answers).samples(recipe()), graph)
    count = len(runs)
    assert count
    check(replace(other, answers=answers).samples(recipe()), ranked)
    assert len(runs) == count


def test_outputs_in_fp64_keep_their_types() -> None:
    made, _ = sampler(Precise.of(TEXT, (PICTURE,)))
    samples = made.samples(recipe())
    exact_samples = made.beside_fp64(samples)
    assert exact_samples is not None
    precise, source_error = exact_samples
    assert source_error == pytest.approx(1 / 3, rel=1e-5)
    for sample, exact in zip(samples, precise, strict=True):
        for name, array in sample.outputs.items():
            assert exact.outputs[name].dtype == array.dtype
            np.testing.assert_allclose(exact.outputs[name], array * 1.5, rtol=1e-6)


def test_indices_reach_every_row_of_their_table() -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (int64[B,4] ids, int64[B] n) => (float[B,4,3] y, int64[B] m) '
    text += "<float[500,3] table> { i = Identity(ids) y = Gather(table, i) m = Identity(n) }"
    graph = onnx_ir.from_onnx_text(text, initializers=[onnx_ir.tensor(draw(500, 3), name="table")])
    specs = (InputSpec(name="ids", dtype=DType.INT64, shape=(4,)), InputSpec(name="n", dtype=DType.INT64, shape=()))
    found = with_index_ranges(TextSource.of(TEXT, specs), graph)
    assert [spec.high for spec in found.inputs] == [500, 2]
