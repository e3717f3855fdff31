"""Ground truth of a folder of images, in pixels of a model's input.

Objects are in the folder's `annotations.json`, in COCO's format; the class of each pixel in an image of the same name
in a folder beside it, `FOLDER.masks`; the class of an image is the name of its folder.

Source: the COCO data format; the VOC devkit for 255, the pixels that do not count.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from graphkiln_backend.graph.errors import ConversionError, InvalidInput
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task
from graphkiln_backend.images.decoding import open_image
from graphkiln_backend.images.frame import Frame, frame_of
from graphkiln_backend.proof.metrics import UNKNOWN, Objects, TaskTargets

_log = logging.getLogger("graphkiln.converters")

ANNOTATIONS = "annotations.json"
MASKS_SUFFIX = ".masks"
_MOST_BYTES = 512 * MIB
_IGNORED = 255
# Images of a class, and classes, without which there is no nearest one.
_FEWEST = 2


def read_task_targets(
    folder: Path, files: Sequence[Path], task: Task | None, labels: Sequence[str], preprocess: Preprocess
) -> TaskTargets | None:
    """Read the ground truth of a task for images; None where the folder has none.

    Args:
        folder: Folder of the images.
        files: The images.
        task: The task.
        labels: Names of the classes.
        preprocess: Preprocessing of an image.

    Raises:
        ConversionError: The ground truth cannot be read, or does not fit.
    """
    if isinstance(task, Detection) and (folder / ANNOTATIONS).exists():
        return _objects(folder, files, labels, preprocess)
    if isinstance(task, Segmentation) and _masks_of(folder).is_dir():
        known = len(labels) if task.scores else 0  # of which there is a label for each
        return np.stack([_class_map(file, folder, preprocess, known) for file in files])
    if isinstance(task, Embedding):
        return _classes(files)
    return None


def _classes(files: Sequence[Path]) -> npt.NDArray[np.int64] | None:
    """The classes of images by their folders; None where no image has another one of its class, or all are of one."""
    names = [file.parent.name for file in files]
    classes = sorted(set(names))
    single = [name for name in classes if names.count(name) < _FEWEST]
    if len(classes) < _FEWEST or len(single) == len(classes):
        return None
    if single:
        _log.warning("recall@1 is not measured: there is one image alone of '%s'", single[0])
        return None
    return np.array([classes.index(name) for name in names], np.int64)


def _masks_of(folder: Path) -> Path:
    return folder.resolve().with_name(f"{folder.resolve().name}{MASKS_SUFFIX}")


def _class_map(file: Path, folder: Path, preprocess: Preprocess, classes: int) -> npt.NDArray[np.int64]:
    """The class of each pixel of the input, `[height, width]`; where the image is not, it is unknown.

    `classes` is how many the model has; 0 where that is not known.
    """
    mask = (_masks_of(folder) / file.relative_to(folder)).with_suffix(".png")
    pixels, image = _mask_pixels(mask, classes), _open(file)
    if pixels.shape != (image.height, image.width):
        raise ConversionError(
            f"{mask} has {pixels.shape[1]}x{pixels.shape[0]} pixels, its image {image.width}x{image.height}"
        )
    frame = frame_of(preprocess, pixels.shape)
    rows, columns = (_sampled(frame, axis) for axis in (0, 1))
    found = pixels[rows.clip(0, frame.height - 1)][:, columns.clip(0, frame.width - 1)].astype(np.int64)
    outside = ((rows < 0) | (rows >= frame.height))[:, None] | ((columns < 0) | (columns >= frame.width))
    known: npt.NDArray[np.int64] = np.where(outside | (found == _IGNORED), UNKNOWN, found)
    return known


def _sampled(frame: Frame, axis: int) -> npt.NDArray[np.int64]:
    """The rows (0) or columns (1) of the image in which the centers of the input's lie."""
    size, scale, shift = (
        (frame.input_height, frame.scale_y, frame.top) if axis == 0 else (frame.input_width, frame.scale_x, frame.left)
    )
    places: npt.NDArray[np.float64] = (np.arange(size) + 0.5 - shift) * scale
    return np.floor(places).astype(np.int64)


def _mask_pixels(mask: Path, classes: int) -> npt.NDArray[np.uint8]:
    """Class numbers, `[height, width]`: of gray or of palette images, whose colors do not matter."""
    image = _open(mask)
    if image.mode not in ("L", "P"):
        raise ConversionError(
            f"{mask} must hold class numbers as 8-bit gray or palette pixels, its mode is {image.mode}"
        )
    pixels = np.asarray(image, np.uint8)
    highest = int(pixels[pixels != _IGNORED].max(initial=0))
    if classes and highest >= classes:
        raise ConversionError(
            f"{mask} holds the class {highest}, the model has {classes}: 0 to {classes - 1}",
            hint=f"number them as the lines of the labels file, from 0; {_IGNORED} marks unknown pixels",
        )
    return pixels


def _open(file: Path) -> Image.Image:
    try:
        return open_image(file)
    except InvalidInput as error:
        raise ConversionError(error.message, hint=error.hint) from error


def _objects(folder: Path, files: Sequence[Path], labels: Sequence[str], preprocess: Preprocess) -> list[Objects]:
    """The objects of each image, in pixels of the input."""
    path = folder / ANNOTATIONS
    try:
        document = json.loads(read_bytes(path, _MOST_BYTES))
        by_file = _boxes_by_file(document, labels)
    except ConversionError as error:
        raise ConversionError(f"{path}: {error.message}", hint=error.hint) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConversionError(
            f"{path} is not in COCO's format: {type(error).__name__}: {error}",
            hint="it needs images, annotations and categories",
        ) from error
    return [_placed(file, by_file.get(file.relative_to(folder).as_posix()), path, preprocess) for file in files]


def _boxes_by_file(document: Mapping[str, Any], labels: Sequence[str]) -> dict[str, list[tuple[int, list[float]]]]:
    """Class and corners of each object, by the name of its image. Crowds are left out."""
    names = {image["id"]: str(image["file_name"]) for image in document["images"]}
    classes = {row["id"]: _class_of(str(row["name"]), labels) for row in document["categories"]}
    found: dict[str, list[tuple[int, list[float]]]] = {name: [] for name in names.values()}
    for row in document["annotations"]:
        if not row.get("iscrowd"):
            left, top, width, height = map(float, row["bbox"])
            corners = [left, top, left + width, top + height]
            found[names[row["image_id"]]].append((classes[row["category_id"]], corners))
    return found


def _class_of(name: str, labels: Sequence[str]) -> int:
    if name not in labels:
        raise ConversionError(f"category '{name}' is not among the model's {len(labels)} labels", hint="give --labels")
    return labels.index(name)


def _placed(
    file: Path, objects: Sequence[tuple[int, list[float]]] | None, path: Path, preprocess: Preprocess
) -> Objects:
    """Objects of an image in pixels of the input; those that a crop leaves nothing of are left out."""
    if objects is None:
        raise ConversionError(f"{path} does not name the image {file.name}", hint="one without objects is named, too")
    image = _open(file)
    frame = frame_of(preprocess, (image.height, image.width))
    boxes = frame.to_input(np.array([corners for _, corners in objects], np.float64).reshape(-1, 4))
    boxes = boxes.clip(0, [frame.input_width, frame.input_height] * 2)
    kept = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    return Objects(boxes=boxes[kept], classes=np.array([each for each, _ in objects], np.int64)[kept])
