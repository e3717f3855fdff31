"""Small but conclusive outputs of a detector, a segmenter and an embedding."""

from __future__ import annotations

from typing import Any

import numpy as np
from pycocotools import mask as coco

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation

DETECTION = Detection(boxes="boxes", scores="scores", classes="classes", counts="counts", masks="masks")
SEGMENTATION = Segmentation(scores="maps")
EMBEDDING = Embedding(vectors="vectors")


def detector_outputs(images: int = 3, objects: int = 4, rows: int = 6) -> dict[str, AnyArray]:
    """Boxes of 40 pixels, far from each other, with scores of 0.95, 0.85, ... and half masks."""
    outputs: dict[str, AnyArray] = {
        "boxes": np.zeros((images, rows, 4), np.float32),
        "scores": np.zeros((images, rows), np.float32),
        "classes": np.zeros((images, rows), np.int64),
        "counts": np.full(images, objects, np.int32),
        "masks": np.zeros((images, rows, 14, 14), np.float32),
    }
    for row in range(objects):
        left = 50.0 * row + 3
        outputs["boxes"][:, row] = (left, 10, left + 40, 50)
        outputs["scores"][:, row] = 0.95 - 0.1 * row
        outputs["classes"][:, row] = row % 3
        outputs["masks"][:, row, :, : 5 + row] = 0.9
    return outputs


def segmenter_outputs() -> dict[str, AnyArray]:
    """A square of class 1 and one of class 2 on a background, by a margin of 2: `[2, 3, 32, 32]`."""
    maps = np.zeros((2, 3, 32, 32), np.float32)
    maps[:, 0] = 1.0
    maps[:, 1, 4:16, 4:16] = 3.0
    maps[:, 2, 18:28, 18:28] = 3.0
    return {"maps": maps}


def embedding_outputs() -> dict[str, AnyArray]:
    """Vectors in two directions, `[8, 16]`, four of each."""
    generator = np.random.default_rng(3)
    directions = generator.normal(size=(2, 16))
    vectors = np.repeat(directions, 4, axis=0) + generator.normal(0, 0.1, (8, 16))
    return {"vectors": vectors.astype(np.float32)}


def decode_rle(rle: dict[str, Any]) -> AnyArray:
    """Decode uncompressed run lengths by COCO's own implementation: `[height, width]`."""
    pixels: AnyArray = coco.decode(coco.frPyObjects(rle, *rle["size"]))
    return pixels.astype(bool)
