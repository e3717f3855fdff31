"""The images of a story: those that its variants are proven and measured on, and others for calibration."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln.story.digits import CLASSES, split_digits
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.decoding import open_image
from graphkiln_backend.images.formats import image_files

EVALUATION_COUNT = 200
"""Images that every variant is proven on."""
_CALIBRATION_COUNT = 64
_CONVERSION_COUNT = 64
_SUFFIXES = frozenset({".jpg", ".jpeg"})


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageSet:
    """The images of one story.

    Attributes:
        description: In words.
        evaluation: JPEGs to prove and measure on.
        targets: Their classes, int64 `[evaluation]`; None where these are not known.
        calibration: Other JPEGs, for int8.
        labels: Class names, where they are known.
    """

    description: str
    evaluation: tuple[bytes, ...]
    targets: npt.NDArray[np.int64] | None
    calibration: tuple[bytes, ...]
    labels: tuple[str, ...] = ()

    def write(self, samples: Path, calibration: Path, labels: Path) -> None:
        """Writes the files that `graphkiln convert` takes: samples in one folder for each class, labels in lines."""
        labels.parent.mkdir(parents=True, exist_ok=True)
        if self.labels:
            labels.write_text("\n".join(self.labels) + "\n", encoding="utf-8")
        for number, jpeg in enumerate(self.evaluation[:_CONVERSION_COUNT]):
            name = self.labels[self.targets[number]] if self.targets is not None else "unknown"
            (samples / name).mkdir(parents=True, exist_ok=True)
            (samples / name / f"{number:03}.jpg").write_bytes(jpeg)
        calibration.mkdir(exist_ok=True)
        for number, jpeg in enumerate(self.calibration):
            (calibration / f"{number:03}.jpg").write_bytes(jpeg)


def choose_images(folder: Path | None, classes: int) -> ImageSet:
    """The user's own JPEGs, half of them for each purpose; without a folder, scikit-learn's digits.

    Args:
        folder: The user's, or None.
        classes: Of the model: the digits' targets are those of a model of ten classes.

    Raises:
        InvalidInput: The folder holds too few JPEGs, or one that cannot be decoded.
    """
    if folder is None:
        training, held_out = split_digits()
        evaluation = held_out.first(EVALUATION_COUNT)
        return ImageSet(
            description=f"{EVALUATION_COUNT} held-out digits",
            evaluation=evaluation.jpegs,
            targets=evaluation.targets if classes == len(CLASSES) else None,
            labels=CLASSES if classes == len(CLASSES) else (),
            calibration=training.first(_CALIBRATION_COUNT).jpegs,
        )
    files = image_files(folder, _SUFFIXES) if folder.is_dir() else []
    if len(files) < 4:
        raise InvalidInput(f"--samples {folder} holds {len(files)} JPEGs, at least 4 are needed")
    evens, odds = files[::2][:EVALUATION_COUNT], files[1::2][:_CALIBRATION_COUNT]
    return ImageSet(
        description=f"{len(evens)} images of {folder}",
        evaluation=tuple(map(_read_image, evens)),
        targets=None,
        calibration=tuple(map(_read_image, odds)),
    )


def _read_image(path: Path) -> bytes:
    """The file of an image that can be decoded: a damaged one is better named before anything is measured."""
    open_image(path)
    return path.read_bytes()
