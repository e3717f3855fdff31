"""Inputs of `bench`: random, given, or samples of which each request has another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import FakeModel
from PIL import Image

from graphkiln.cli.bench_inputs import read_feeds, read_samples
from graphkiln_backend.graph.errors import InvalidInput

ROWS = np.arange(20, dtype=np.float32).reshape(5, 2, 2)


def read(path: Path, size: int = 1) -> list[Any]:
    model: Any = FakeModel()
    return [feeds["X"] for feeds in read_samples(model, path, size)]


def test_each_row_of_an_archive_is_a_request(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", X=ROWS)
    found = read(tmp_path / "s.npz")
    np.testing.assert_array_equal(np.concatenate(found), ROWS)
    assert {array.shape for array in found} == {(1, 2, 2)}


def test_or_several_rows_are(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", X=ROWS)
    assert [array.shape for array in read(tmp_path / "s.npz", 2)] == [(2, 2, 2)] * 2


def test_golden_samples_give_their_inputs(tmp_path: Path, repository: Path) -> None:
    np.savez(tmp_path / "golden.npz", **{"input/X": ROWS, "source/Y": ROWS, "graph/Y": ROWS})
    for path in (tmp_path, tmp_path / "golden.npz"):
        assert len(read(path)) == 5
    model: Any = FakeModel()
    digits = read_samples(model, repository / "model_repository" / "digits" / "1", 1)
    assert {name: array.shape for name, array in digits[0].items()} == {"INPUT_0": (1, 1, 32, 32)}


def test_a_sample_of_a_model_without_batches_is_a_request_as_it_is(tmp_path: Path) -> None:
    np.savez(tmp_path / "golden.npz", **{"input/X": ROWS, "graph/Y": ROWS})
    model: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [2, 2]}])
    found = [feeds["X"] for feeds in read_samples(model, tmp_path, 1)]
    np.testing.assert_array_equal(np.stack(found), ROWS)


def test_a_folder_holds_images_and_requests(tmp_path: Path) -> None:
    for name in (".DS_Store", "._b.png"):
        (tmp_path / name).write_bytes(b"no image")
    Image.new("L", (4, 4), 255).save(tmp_path / "b.png")
    np.savez(tmp_path / "a.npz", X=ROWS[:3])
    model: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [-1, 3, 2, 2]}])
    first, second = read_samples(model, tmp_path, 1)
    assert (first["X"].shape, second["X"].shape) == ((3, 2, 2), (1, 3, 2, 2))


@pytest.mark.parametrize(
    ("arrays", "size", "words"),
    [
        ({"X": ROWS, "Z": ROWS[:2]}, 1, r"do not have a row for each sample: X \[5, 2, 2\], Z \[2, 2, 2\]"),
        ({"X": ROWS}, 6, "holds 5 samples, a request takes 6"),
        ({"X": ROWS[:0]}, 1, "is empty"),
        ({"X": np.float32(1)}, 1, "is empty"),
        ({}, 1, "do not have a row"),
    ],
)
def test_archives_without_samples(tmp_path: Path, arrays: dict[str, Any], size: int, words: str) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(InvalidInput, match=words):
        read(tmp_path / "s.npz", size)


def test_paths_without_samples(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no image")
    for name in ("bad.npz", "empty", "nowhere", "nowhere.npz", "texts"):
        with pytest.raises(InvalidInput):
            read(tmp_path / name)


def test_random_inputs_are_the_same_every_time() -> None:
    rows = [
        ("F", "FP16", [-1, 3]),
        ("I", "INT64", [-1]),
        ("B", "BOOL", [2, 2]),
        ("T", "BYTES", [-1, 1]),
        ("S", "FP32", []),
    ]
    model: Any = FakeModel(inputs=[{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in rows])
    first, second = (read_feeds(model, ["random"], 5) for _ in range(2))
    assert {name: (array.dtype.name, array.shape) for name, array in first.items()} == {
        "F": ("float16", (5, 3)), "I": ("int64", (5,)), "B": ("bool", (2, 2)), "T": ("object", (5, 1)),
        "S": ("float32", (1,)),
    }  # fmt: skip
    assert set(first["I"].tolist()) <= {0, 1}
    assert set(first["T"].ravel()) == {b"text"}
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    unknown: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [-1, -1, 3]}])
    with pytest.raises(InvalidInput, match=r"'X' has no fixed shape: \[-1, -1, 3\].*--input NAME=FILE.npy"):
        read_feeds(unknown, ["random"], 1)


@pytest.mark.parametrize(("declared", "shape"), [([-1, 3, 2, 2], (1, 3, 2, 2)), ([3, 2, 2], (3, 2, 2))])
def test_an_image_takes_the_preprocessing_of_the_model(tmp_path: Path, declared: list[int], shape: Any) -> None:
    Image.new("RGB", (8, 6), (255, 0, 0)).save(tmp_path / "red.png")
    model: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": declared}])
    fed = read_feeds(model, [str(tmp_path / "red.png")], 1)["X"]
    assert fed.shape == shape
    assert fed.reshape(3, -1)[:, 0].tolist() == [1.0, 0.0, 0.0]
    model.inputs *= 2
    with pytest.raises(InvalidInput, match="has 2 inputs"):
        read_feeds(model, [str(tmp_path / "red.png")], 1)


def test_tensors_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    model: Any = FakeModel()
    assert list(read_feeds(model, [f"A={tmp_path / 'a.npy'}", f"B={tmp_path / 'a.npy'}"], 1)) == ["A", "B"]


def test_the_model_beside_another_one_gets_images_as_they_are(tmp_path: Path) -> None:
    """It got a tensor, or the word `text`, and refused each request."""
    Image.new("L", (4, 4), 255).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    config = {"parameters": {"tensor_model": {"string_value": "m"}}}
    for shape, expected in (([-1, 1], (1, 1)), ([1], (1,))):
        inputs = [{"name": "IMAGE", "datatype": "BYTES", "shape": shape}]
        model: Any = FakeModel(name="m.images", inputs=inputs, config=config)
        for feeds in (read_feeds(model, [str(tmp_path / "a.png")], 1), *read_samples(model, tmp_path, 1)):
            assert (feeds["IMAGE"].shape, feeds["IMAGE"].ravel().tolist()) == (expected, [content])
        with pytest.raises(InvalidInput, match=r"'m\.images' takes encoded images \(give some: --input IMAGE"):
            read_feeds(model, ["random"], 1)
        with pytest.raises(InvalidInput, match=r"cannot read .*b\.png: No such file"):
            read_feeds(model, [str(tmp_path / "b.png")], 1)
        (tmp_path / "b.png").write_bytes(b"hello")
        with pytest.raises(InvalidInput, match=r"b\.png: 5 bytes is not an image in a known format"):
            read_samples(model, tmp_path, 1)
        (tmp_path / "b.png").unlink()


def test_a_batch_size_without_effect_is_a_mistake(tmp_path: Path) -> None:
    """It would measure single rows without a word."""
    whole: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [2, 2]}])
    assert read_feeds(whole, ["random"], 1)["X"].shape == (2, 2)
    with pytest.raises(InvalidInput, match=r"takes no batches.*--batch-size 8"):
        read_feeds(whole, ["random"], 8)
    np.savez(tmp_path / "a.npz", X=ROWS)
    with pytest.raises(InvalidInput, match="takes no batches"):
        read_samples(whole, tmp_path / "a.npz", 2)
    with pytest.raises(InvalidInput, match="--batch-size counts rows"):
        read_feeds(whole, [f"X={tmp_path / 'a.npz'}"], 2)
    assert len(read(tmp_path)) == 1
    with pytest.raises(InvalidInput, match=r"--batch-size 2: each file of .* is a request"):
        read(tmp_path, 2)
