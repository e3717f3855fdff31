"""The images of a story: those that it is proven and measured on, and others to calibrate with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from graphkiln.story.digits import CLASSES, training_and_held_out
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.images.decoding import open_image
from graphkiln_backend.images.formats import image_files

PROVEN = 200
"""Images that every way answers for its proof."""
_CALIBRATION = 64
_CONVERSION = 64
_SUFFIXES = frozenset({".jpg", ".jpeg"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Images:
    """What a story is told with.

    Attributes:
        description: In words.
        proven: JPEGs that are answered.
        targets: What they show, `[proven]`; None where nobody knows.
        calibration: Other JPEGs, for int8.
        labels: Class names, where they are known.
    """

    description: str
    proven: tuple[bytes, ...]
    targets: npt.NDArray[np.int64] | None
    calibration: tuple[bytes, ...]
    labels: tuple[str, ...] = ()

    def write(self, samples: Path, calibration: Path, labels: Path) -> None:
        """Leaves some of them where `graphkiln convert` finds them, in folders named by what they show."""
        labels.parent.mkdir(parents=True, exist_ok=True)
        if self.labels:
            labels.write_text("\n".join(self.labels) + "\n")
        for number, jpeg in enumerate(self.proven[:_CONVERSION]):
            name = self.labels[self.targets[number]] if self.targets is not None else "unknown"
            (samples / name).mkdir(parents=True, exist_ok=True)
            (samples / name / f"{number:03}.jpg").write_bytes(jpeg)
        calibration.mkdir(exist_ok=True)
        for number, jpeg in enumerate(self.calibration):
            (calibration / f"{number:03}.jpg").write_bytes(jpeg)


def choose(folder: Path | None, classes: int) -> Images:
    """The user's own JPEGs, half of them for each purpose; or scikit-learn's digits.

    Args:
        folder: The user's, or None.
        classes: Of the model: the digits' right answers are those of a model of ten.

    Raises:
        InvalidInput: The folder holds too few JPEGs, or one that cannot be decoded.
    """
    if folder is None:
        training, held_out = training_and_held_out()
        proven = held_out.first(PROVEN)
        return Images(
            description=f"{PROVEN} held-out digits",
            proven=proven.jpegs,
            targets=proven.targets if classes == len(CLASSES) else None,
            labels=CLASSES if classes == len(CLASSES) else (),
            calibration=training.first(_CALIBRATION).jpegs,
        )
    files = image_files(folder, _SUFFIXES) if folder.is_dir() else []
    if len(files) < 4:
        raise InvalidInput(f"--samples {folder} holds {len(files)} JPEGs, at least 4 are needed")
    evens, odds = files[::2][:PROVEN], files[1::2][:_CALIBRATION]
    return Images(
        description=f"{len(evens)} images of {folder}",
        proven=tuple(map(_readable, evens)),
        targets=None,
        calibration=tuple(map(_readable, odds)),
    )


def _readable(path: Path) -> bytes:
    """An image that can be decoded: one that cannot is better named before anything is measured."""
    open_image(path)
    return path.read_bytes()
