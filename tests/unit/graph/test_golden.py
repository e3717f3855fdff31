"""Golden samples on disk."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.golden import GoldenSamples, random_order

GOLDEN = GoldenSamples(
    inputs={"x": np.arange(6, dtype=np.float32).reshape(2, 3), "text": np.array(["a", "größe"])},
    source_outputs={"y": np.ones(2), "z": np.zeros((2, 0), np.int8)},
    graph_outputs={"y": np.full(2, 0.5), "z": np.zeros((2, 0), np.int8)},
)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype is not DType.BYTES])
def test_all_types_round_trip(tmp_path: Path, dtype: DType) -> None:
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype.numpy)
    GoldenSamples(inputs={"x": array}, source_outputs={}, graph_outputs={}).write(tmp_path / "golden.npz")
    read = GoldenSamples.read(tmp_path / "golden.npz").inputs["x"]
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array)


TEXTS = ["", "a", "größe", "a\0b", "ends with NUL\0", "\0", "long " * 40_000, "b'bytes'", "日本", "\n"]


@pytest.mark.parametrize("shape", [(10,), (5, 2), (2, 5, 1)])
def test_text_round_trip(tmp_path: Path, shape: tuple[int, ...]) -> None:
    text = np.array(TEXTS, np.object_).reshape(shape)
    coded = np.array([word.encode() for word in TEXTS], np.object_).reshape(shape)
    GoldenSamples(inputs={"a/b": coded}, source_outputs={}, graph_outputs={"y": text}).write(tmp_path / "golden.npz")
    read = GoldenSamples.read(tmp_path / "golden.npz")
    for array in (read.inputs["a/b"], read.graph_outputs["y"]):
        assert array.shape == shape
        assert array.dtype == np.object_
        assert array.ravel().tolist() == TEXTS


def test_empty_text_round_trip(tmp_path: Path) -> None:
    empty = np.empty((0, 3), np.object_)
    GoldenSamples(inputs={"x": empty}, source_outputs={}, graph_outputs={}).write(tmp_path / "golden.npz")
    assert GoldenSamples.read(tmp_path / "golden.npz").inputs["x"].shape == (0, 3)


@pytest.mark.parametrize(
    "arrays",
    [
        {"input.text/x": np.zeros(3, np.uint8), "input.lengths/x": np.array([2, 2])},
        {"input.text/x": np.zeros(3, np.uint8), "input.lengths/x": np.array([4, -1])},
        {"input.text/x": np.zeros(3, np.uint8)},
        {"input.text/x": np.full(2, 255, np.uint8), "input.lengths/x": np.array([1, 1])},
        {"input.text/x": np.zeros(2), "input.lengths/x": np.array([1, 1])},
    ],
)
def test_damaged_text(tmp_path: Path, arrays: dict[str, np.ndarray]) -> None:
    np.savez(tmp_path / "golden.npz", **arrays)
    with pytest.raises(ManifestError, match="cannot read golden samples"):
        GoldenSamples.read(tmp_path / "golden.npz")


def test_groups_round_trip(tmp_path: Path) -> None:
    GOLDEN.write(tmp_path / "golden.npz")
    read = GoldenSamples.read(tmp_path / "golden.npz")
    for group in ("inputs", "source_outputs", "graph_outputs"):
        ours, theirs = getattr(GOLDEN, group), getattr(read, group)
        assert list(ours) == list(theirs)
        for name in ours:
            assert theirs[name].shape == ours[name].shape
            np.testing.assert_array_equal(theirs[name], ours[name])


@pytest.mark.parametrize("name", ["input/x", "ünï"])
def test_names_with_slashes(tmp_path: Path, name: str) -> None:
    samples = GoldenSamples(inputs={name: np.ones(1)}, source_outputs={name: np.zeros(1)}, graph_outputs={})
    samples.write(tmp_path / "golden.npz")
    read = GoldenSamples.read(tmp_path / "golden.npz")
    assert (list(read.inputs), list(read.source_outputs)) == ([name], [name])
    assert (read.inputs[name], read.source_outputs[name]) == (1, 0)


def test_only() -> None:
    part = GOLDEN.only({"z", "nonesuch"})
    assert list(part.source_outputs) == list(part.graph_outputs) == ["z"]
    assert part.inputs is GOLDEN.inputs
    assert not GOLDEN.only([]).graph_outputs


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"cannot read golden samples from .*golden\.npz.*No such file"):
        GoldenSamples.read(tmp_path / "golden.npz")


def test_truncated_file(tmp_path: Path) -> None:
    GOLDEN.write(tmp_path / "golden.npz")
    content = (tmp_path / "golden.npz").read_bytes()
    for length in (len(content) // 2, len(content) - 10):
        (tmp_path / "golden.npz").write_bytes(content[:length])
        with pytest.raises(ManifestError, match="cannot read golden samples"):
            GoldenSamples.read(tmp_path / "golden.npz")


def test_flipped_byte(tmp_path: Path) -> None:
    samples = GoldenSamples(
        inputs={"x": np.random.default_rng(0).normal(size=999)}, source_outputs={}, graph_outputs={}
    )
    samples.write(tmp_path / "golden.npz")
    content = bytearray((tmp_path / "golden.npz").read_bytes())
    content[len(content) // 2] ^= 255
    (tmp_path / "golden.npz").write_bytes(content)
    with pytest.raises(ManifestError, match="cannot read golden samples"):
        GoldenSamples.read(tmp_path / "golden.npz")


def test_unknown_group(tmp_path: Path) -> None:
    np.savez(tmp_path / "golden.npz", **{"weights/x": np.ones(1)})
    with pytest.raises(ManifestError, match="weights"):
        GoldenSamples.read(tmp_path / "golden.npz")


def test_full_disk(tmp_path: Path) -> None:
    (tmp_path / "golden.npz").symlink_to("/dev/full")
    golden = GoldenSamples(inputs={"x": np.random.default_rng(0).random(99)}, source_outputs={}, graph_outputs={})
    with pytest.raises(OSError, match="No space left"):
        golden.write(tmp_path / "golden.npz")
    gc.collect()


class TestDrawnOrder:
    @pytest.mark.parametrize("count", [2, 3, 16])
    @pytest.mark.parametrize("size", [2, 3, 4, 6, 7, 32])
    def test_parts_differ_from_their_neighbors(self, count: int, size: int) -> None:
        order = random_order(count, size)
        assert set(order.tolist()) <= set(range(count))
        for rows in range(1, size // 2 + 1):
            assert order[:rows].tolist() not in (order[rows : 2 * rows].tolist(), order[-rows:].tolist())

    def test_two_samples_in_two_rows(self) -> None:
        """The first draw is twice the same sample, which would hide swapped parts."""
        assert np.random.default_rng(0).integers(2, size=2).tolist() == [1, 1]
        assert sorted(random_order(2, 2).tolist()) == [0, 1]

    def test_order_is_reproducible(self) -> None:
        assert random_order(3, 8).tolist() == random_order(3, 8).tolist()
        assert random_order(1, 4).tolist() == [0] * 4
        assert random_order(3, 1).shape == (1,)

    def test_shuffled(self) -> None:
        shuffled = GOLDEN.shuffled(5)
        order = random_order(2, 5)
        np.testing.assert_array_equal(shuffled.inputs["x"], GOLDEN.inputs["x"][order])
        np.testing.assert_array_equal(shuffled.inputs["text"], GOLDEN.inputs["text"][order])
        np.testing.assert_array_equal(shuffled.graph_outputs["y"], GOLDEN.graph_outputs["y"][order])
        assert not shuffled.source_outputs
