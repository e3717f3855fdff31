"""Samples for the proof: read from files of a user's, or synthetic; what does not fit is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import draw
from PIL import Image

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError, InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Embedding, Segmentation
from graphkiln_backend.images.decoding import load_sample
from graphkiln_converters.samples import (
    read_reference,
    read_samples,
    read_targets,
    read_targets_of,
    sizes_to_try,
    synthetic_images,
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


def save(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


class TestSizes:
    def test_the_usual_ones_alone_where_none_varies(self) -> None:
        assert list(sizes_to_try([InputSpec(name="a", shape=(3, 4))])) == [{}]

    def test_then_the_smallest_and_the_largest_together(self) -> None:
        specs = [
            InputSpec(name="a", shape=(3, 4), dynamic={0: (1, 9), 1: (2, 8)}),
            InputSpec(name="b", shape=(5,)),
        ]
        assert list(sizes_to_try(specs)) == [{}, {"a": {0: 1, 1: 2}, "b": {}}, {"a": {0: 9, 1: 8}, "b": {}}]


class TestSyntheticImages:
    def test_are_the_same_each_time(self) -> None:
        np.testing.assert_array_equal(synthetic_images((12, 9, 3), 4), synthetic_images((12, 9, 3), 4))

    @pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (64, 32, 1), (2, 300, 3)])
    def test_of_any_size(self, shape: tuple[int, int, int]) -> None:
        images = synthetic_images(shape, 3)
        assert images.shape == (3, *shape)
        assert images.dtype == np.uint8

    def test_are_smooth_and_differ(self) -> None:
        """Neighbors are alike, as in photographs: noise alone would not show errors of half a pixel."""
        images = synthetic_images((64, 64, 3), 4).astype(float)
        blocks = images.reshape(4, 8, 8, 8, 8, 3).mean(axis=(2, 4))
        assert blocks.std() > 0.4 * images.std(), "an eighth, if it were noise"
        assert len({image.tobytes() for image in images}) == 4


class TestArrays:
    def test_are_read_by_the_names_of_the_graph(self, tmp_path: Path) -> None:
        path = save(tmp_path / "s.npz", INPUT_0=draw(4, 3, 8, 8), other=draw(2))
        found = read_samples(path, IMAGE, None, 256)
        assert list(found) == ["INPUT_0"]
        np.testing.assert_array_equal(found["INPUT_0"], draw(4, 3, 8, 8))

    def test_or_by_those_of_the_source(self, tmp_path: Path) -> None:
        path = save(tmp_path / "s.npz", image=draw(4, 3, 8, 8))
        inputs = {"INPUT_0": InputSpec(name="image", shape=(3, 8, 8))}
        assert list(read_samples(path, inputs, None, 256)) == ["image"]
        path = save(tmp_path / "t.npz", pixels=draw(4, 3, 8, 8))
        with pytest.raises(ConversionError, match=r"lack input INPUT_0 .*the source's own names will do: image"):
            read_samples(path, inputs, None, 256)

    def test_a_number_is_no_sample(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match=r"'INPUT_0' is one number, expected \[samples, \.\.\.\]"):
            read_samples(save(tmp_path / "s.npz", INPUT_0=np.float32(3)), IMAGE, None, 256)

    def test_of_many_evenly_spread_ones(self, tmp_path: Path) -> None:
        rows = np.arange(100, dtype=np.float32)[:, np.newaxis]
        path = save(tmp_path / "s.npz", x=rows)
        found = read_samples(path, {"x": InputSpec(name="x", shape=(1,))}, None, 5)["x"].ravel()
        np.testing.assert_array_equal(found, [0, 25, 50, 74, 99])

    def test_as_many_as_the_shortest_has(self, tmp_path: Path) -> None:
        path = save(tmp_path / "s.npz", a=draw(7, 2), b=draw(3, 2))
        specs = {name: InputSpec(name=name, shape=(2,)) for name in ("a", "b")}
        assert {len(array) for array in read_samples(path, specs, None, 256).values()} == {3}

    @pytest.mark.parametrize(
        ("content", "words"),
        [
            ({"other": np.zeros(3)}, "lack input INPUT_0.*it holds other"),
            ({}, "lack input INPUT_0.*it holds nothing"),
            ({"INPUT_0": np.zeros((0, 3, 8, 8), np.float32)}, "holds no sample"),
        ],
    )
    def test_what_does_not_fit(self, tmp_path: Path, content: dict[str, Any], words: str) -> None:
        with pytest.raises(ConversionError, match=words):
            read_samples(save(tmp_path / "s.npz", **content), IMAGE, None, 256)

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        np.save(tmp_path / "one.npy", draw(3))
        (tmp_path / "text.npz").write_text("no arrays")
        whole = save(tmp_path / "whole.npz", INPUT_0=draw(4, 3, 8, 8)).read_bytes()
        (tmp_path / "cut.npz").write_bytes(whole[: len(whole) // 2])
        (tmp_path / "empty.npz").touch()
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
            ("empty.npz", "cannot read samples"),
            ("damaged.npz", "cannot read samples"),
            ("objects.npz", "cannot read samples"),
            ("latin.npz", "its text is not UTF-8"),
            ("missing.npz", "cannot read samples"),
        ]:
            with pytest.raises(ConversionError, match=words):
                read_samples(tmp_path / name, IMAGE, None, 256)


class TestImages:
    def test_are_decoded_by_the_spec_in_the_order_of_their_paths(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, "b.png", "a/c.png", "a/b.png")
        found = read_samples(folder, IMAGE, SPEC, 256)["INPUT_0"]
        expected = [load_sample(folder / name, SPEC) for name in ("a/b.png", "a/c.png", "b.png")]
        np.testing.assert_array_equal(found, np.stack(expected))

    def test_of_many_evenly_spread_ones(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, *(f"{number}.png" for number in range(9)))
        assert len(read_samples(folder, IMAGE, SPEC, 4)["INPUT_0"]) == 4

    def test_of_several_sizes_are_refused_by_name(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, "a.png", "b.png")
        Image.new("RGB", (30, 11)).save(folder / "c.png")
        with pytest.raises(ConversionError, match=r"c\.png becomes \[3, 11, 30\], .*a\.png \[3, ") as caught:
            read_samples(folder, IMAGE, Preprocess(), 256)
        assert "--preprocess" in caught.value.hint

    def test_a_folder_without_one(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").touch()
        with pytest.raises(ConversionError, match="holds no image") as caught:
            read_samples(tmp_path, IMAGE, SPEC, 256)
        assert ".png" in caught.value.hint

    def test_of_other_formats_are_told_of(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        """Of a phone's images the proof knew those alone that were JPEG, and said nothing."""
        folder = save_images(tmp_path, "a.png")
        for name in ("b.HEIC", "c.avif"):
            (folder / name).touch()
        assert len(read_samples(folder, IMAGE, SPEC, 256)["INPUT_0"]) == 1
        assert f"left out 2 files, such as {folder / 'b.HEIC'}, of other formats" in caplog.text
        (folder / "a.png").unlink()
        with pytest.raises(ConversionError, match=r"holds 2 files, such as .*b\.HEIC, of other formats"):
            read_samples(folder, IMAGE, SPEC, 256)

    @pytest.mark.parametrize("damage", [b"", b"no image", "gone"])
    def test_one_that_cannot_be_read_is_named(self, tmp_path: Path, damage: bytes | str) -> None:
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
    def test_need_one_input_and_a_spec(
        self, tmp_path: Path, specs: dict[str, InputSpec], preprocess: Preprocess | None
    ) -> None:
        with pytest.raises(ConversionError, match="one image input only"):
            read_samples(save_images(tmp_path, "a.png"), specs, preprocess, 256)


class TestTargets:
    def test_are_the_names_of_the_folders(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, "dog/1.png", "cat/1.png", "cat/2.png")
        found = read_targets(folder, ["cat", "dog"], 256)
        np.testing.assert_array_equal(found, [0, 0, 1])  # type: ignore[arg-type]

    def test_of_the_same_images_that_are_read(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, *(f"c{number}/1.png" for number in range(9)))
        labels = [f"c{number}" for number in range(9)]
        found = read_targets(folder, labels, 3)
        np.testing.assert_array_equal(found, [0, 4, 8])  # type: ignore[arg-type]

    @pytest.mark.parametrize("labels", [[], ["cat"], ["Cat", "dog"]])
    def test_are_not_known_where_one_is_not_a_label(self, tmp_path: Path, labels: list[str]) -> None:
        assert read_targets(save_images(tmp_path, "cat/1.png", "dog/1.png"), labels, 256) is None

    @pytest.mark.parametrize(("labels", "told"), [(["cat"], True), (["Cat", "dog"], True), (["mouse"], False)])
    def test_folders_that_are_nearly_labels_are_told_of(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, labels: list[str], told: bool
    ) -> None:
        """The accuracy was not measured, and nothing said why."""
        assert read_targets(save_images(tmp_path, "cat/1.png", "dog/1.png"), labels, 256) is None
        assert ("no label is called '" in caplog.text) == told

    def test_of_other_tasks_are_what_is_written_down(self, tmp_path: Path) -> None:
        folder = save_images(tmp_path, *(f"{name}/{number}.png" for name in ("cat", "dog") for number in (1, 2)))
        vectors, spec = Embedding(vectors="v"), Preprocess(resize=4, crop=(4, 4))
        np.testing.assert_array_equal(read_targets_of(vectors, folder, [], 256, spec), [0, 0, 1, 1])  # type: ignore[arg-type]
        assert read_targets_of(Segmentation(scores="s"), folder, ["cat", "dog"], 256, spec) is None
        assert read_targets_of(vectors, folder, [], 256, None) is None

    def test_are_not_known_of_files_and_empty_folders(self, tmp_path: Path) -> None:
        assert read_targets(save(tmp_path / "s.npz", x=draw(2)), ["x"], 256) is None
        (tmp_path / "empty").mkdir()
        assert read_targets(tmp_path / "empty", ["x"], 256) is None


RECORDED = {"a": draw(3, 2), "b": np.arange(3), "y": draw(3, 5)}


class TestReference:
    SPECS = (InputSpec(name="a", shape=(2,)), InputSpec(name="b", shape=(), dtype=DType.INT64))

    @pytest.mark.parametrize("names", [("a", "b", "y"), ("INPUT_0", "INPUT_1", "OUTPUT_0"), ("a", "INPUT_1", "y")])
    def test_by_the_sources_names_or_by_number(self, tmp_path: Path, names: tuple[str, ...]) -> None:
        path = save(tmp_path / "r.npz", **dict(zip(names, RECORDED.values(), strict=True)))
        feeds, outputs = read_reference(path, self.SPECS, ["y"])
        assert (list(feeds), list(outputs)) == (["a", "b"], ["y"])
        np.testing.assert_array_equal(outputs["y"], RECORDED["y"])

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"b": None}, "lacks 'b'.*it holds a, y"),
            ({"y": None}, "lacks 'y'"),
            ({"a": np.zeros((3, 2))}, r"input 'a' is float64 \[3, 2\], expected FP32 \[samples, 2\]"),
            ({"a": np.zeros((3, 2, 1), "f4")}, r"input 'a' is float32 \[3, 2, 1\]"),
            ({"y": draw(4, 5)}, "as many samples of everything.*y 4"),
            ({"y": np.float32(1)}, "y 0"),
            ({"a": np.zeros((0, 2), "f4"), "b": np.arange(0), "y": np.zeros((0, 5), "f4")}, "one at least"),
        ],
    )
    def test_what_does_not_fit(self, tmp_path: Path, change: dict[str, Any], words: str) -> None:
        arrays = {name: array for name, array in {**RECORDED, **change}.items() if array is not None}
        with pytest.raises(ConversionError, match=words):
            read_reference(save(tmp_path / "r.npz", **arrays), self.SPECS, ["y"])

    def test_what_cannot_be_read(self, tmp_path: Path) -> None:
        with pytest.raises(ConversionError, match="cannot read reference from"):
            read_reference(tmp_path / "none.npz", self.SPECS, ["y"])
