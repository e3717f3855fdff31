"""Ground truth of images: COCO annotations, masks, folders of classes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Classification, Detection, Embedding, Segmentation
from graphkiln_backend.images.formats import image_files
from graphkiln_converters.samples import read_task_targets

DETECTION = Detection(boxes="b", scores="s", classes="c", counts="n")
SEGMENTATION = Segmentation(scores="s")
EMBEDDING = Embedding(vectors="v")
LETTERBOX = Preprocess(letterbox=Letterbox(size=(8, 8), padding=0), interpolation="box")
CROP = Preprocess(resize=8, crop=(8, 8))
LABELS = ("cat", "dog")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two images: 16 wide and 8 high, and 8 wide and 16 high."""
    (tmp_path / "photos" / "more").mkdir(parents=True)
    Image.new("RGB", (16, 8)).save(tmp_path / "photos" / "a.png")
    Image.new("RGB", (8, 16)).save(tmp_path / "photos" / "more" / "b.jpg")
    return tmp_path / "photos"


def document(*annotations: dict[str, Any]) -> dict[str, Any]:
    return {
        "images": [{"id": 7, "file_name": "a.png"}, {"id": 8, "file_name": "more/b.jpg"}],
        "categories": [{"id": 18, "name": "dog"}, {"id": 17, "name": "cat"}],
        "annotations": [*annotations],
    }


def row(image: int, category: int, *bbox: float, **more: Any) -> dict[str, Any]:
    return {"id": 1, "image_id": image, "category_id": category, "bbox": [*bbox], **more}


def read(folder: Path, task: Any, preprocess: Preprocess = LETTERBOX, labels: tuple[str, ...] = LABELS) -> Any:
    return read_task_targets(folder, image_files(folder), task, labels, preprocess)


def test_objects_in_pixels_of_the_input(folder: Path) -> None:
    annotations = document(row(7, 18, 4, 2, 8, 4), row(8, 17, 0, 0, 8, 16), row(7, 17, 0, 0, 16, 8, iscrowd=1))
    (folder / "annotations.json").write_text(json.dumps(annotations))
    first, second = read(folder, DETECTION)
    # Half the size, and 2 pixels of padding above: 16 x 8 became 8 x 4.
    np.testing.assert_allclose(first.boxes, [[2, 3, 6, 5]])
    np.testing.assert_allclose(second.boxes, [[2, 0, 6, 8]])
    assert (first.classes.tolist(), second.classes.tolist()) == ([1], [0])


def test_objects_are_clipped_to_a_crop(folder: Path) -> None:
    annotations = document(row(7, 18, 0, 0, 3, 8), row(7, 17, 2, 1, 4, 2))
    (folder / "annotations.json").write_text(json.dumps(annotations))
    first, second = read(folder, DETECTION, CROP)  # of 16 columns the middle 8
    np.testing.assert_allclose(first.boxes, [[0, 1, 2, 3]])
    assert first.classes.tolist() == [0]
    assert second.boxes.shape == (0, 4)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"annotations": [row(9, 18, 0, 0, 1, 1)]}, "not in COCO's format: KeyError: 9"),
        ({"annotations": [row(7, 18, 0, 0, 1)]}, "not in COCO's format: ValueError"),
        ({"categories": [{"id": 1, "name": "cow"}]}, "category 'cow' is not among"),
        ({"images": [{"id": 7, "file_name": "a.png"}]}, "does not list the image b.jpg"),
    ],
)
def test_invalid_annotations_are_refused(folder: Path, change: dict[str, Any], words: str) -> None:
    (folder / "annotations.json").write_text(json.dumps({**document(), **change}))
    with pytest.raises(ConversionError, match=words) as caught:
        read(folder, DETECTION)
    assert "annotations.json" in str(caught.value)
    assert caught.value.hint


def test_a_file_that_is_not_json_is_refused(folder: Path) -> None:
    (folder / "annotations.json").write_text("[")
    with pytest.raises(ConversionError, match="not in COCO's format: JSONDecodeError"):
        read(folder, DETECTION)


def masks(folder: Path, **images: Any) -> None:
    for name, pixels in images.items():
        path = folder.with_name("photos.masks") / f"{name.replace('_', '/')}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.asarray(pixels, np.uint8)).save(path)


def test_class_maps_at_the_size_of_the_input(folder: Path) -> None:
    wide, tall = np.zeros((8, 16)), np.ones((16, 8))
    wide[:, 8:], wide[0:2, 0:2] = 2, 255
    masks(folder, a=wide, more_b=tall)
    first, second = read(folder, SEGMENTATION, labels=())
    outside = np.full(8, -1)
    expected = np.array([outside, outside, *[[0, 0, 0, 0, 2, 2, 2, 2]] * 4, outside, outside])
    expected[2, 0] = -1  # unknown
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(second, np.tile([-1, -1, 1, 1, 1, 1, -1, -1], (8, 1)))


def test_a_class_map_through_a_crop(folder: Path) -> None:
    wide = np.tile(np.arange(16), (8, 1))
    masks(folder, a=wide, more_b=np.zeros((16, 8)))
    found = read(folder, SEGMENTATION, CROP, labels=())[0]
    np.testing.assert_array_equal(found, np.tile(np.arange(4, 12), (8, 1)))


def test_masks_that_count_from_one_are_refused(folder: Path) -> None:
    wide = np.ones((8, 16))
    wide[0, 0], wide[1, 1] = 2, 255
    masks(folder, a=wide, more_b=np.ones((16, 8)))
    with pytest.raises(ConversionError, match=r"a\.png contains the class 2, the model has 2: 0 to 1") as caught:
        read(folder, SEGMENTATION)
    assert "255" in caught.value.hint
    assert read(folder, Segmentation(classes="m"), labels=("cat",)).max() == 1  # there, labels may be fewer


def test_masks_that_do_not_match_are_refused(folder: Path) -> None:
    masks(folder, a=np.zeros((8, 15)))
    with pytest.raises(ConversionError, match="has 15x8 pixels, its image 16x8"):
        read(folder, SEGMENTATION)
    masks(folder, a=np.zeros((8, 16, 3)))
    with pytest.raises(ConversionError, match=r"must have class numbers .*, its mode is RGB"):
        read(folder, SEGMENTATION)
    masks(folder, a=np.zeros((8, 16)))
    with pytest.raises(ConversionError, match=r"there is no file .*b\.png"):
        read(folder, SEGMENTATION)


def test_classes_are_the_names_of_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("cat/1", "cat/2", "dog/3", "dog/4"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.new("L", (2, 2)).save(tmp_path / f"{name}.png")
    np.testing.assert_array_equal(read(tmp_path, EMBEDDING, labels=()), [0, 0, 1, 1])
    (tmp_path / "dog" / "4.png").unlink()
    assert read(tmp_path, EMBEDDING) is None, "a class of one image has no neighbor"
    assert "recall@1 is not measured: there is only one image of 'dog'" in caplog.text


@pytest.mark.parametrize("task", [DETECTION, SEGMENTATION, EMBEDDING, Classification(), None])
def test_images_without_ground_truth(folder: Path, task: Any) -> None:
    assert read(folder, task) is None
