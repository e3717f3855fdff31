"""ultralytics: a YOLO detector without its last step, non-maximum suppression.

    pip install ultralytics
    graphkiln convert python:docs/sources/ultralytics_yolo.py:make --name boxes --shape 3x64x64

For a trained model, let `make` use `ultralytics.YOLO("FILE.pt").model`: such a file can run code.
"""

import torch
from ultralytics.nn.tasks import DetectionModel


class Boxes(torch.nn.Module):
    """Returns the boxes and scores of all places, and not the feature maps that training needs."""

    def __init__(self, detector: torch.nn.Module) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        """`[batch, 3, height, width]`, from 0 to 1 -> `[batch, 4 + classes, places]`."""
        found: torch.Tensor = self.detector(image)[0]
        return found


def make() -> torch.nn.Module:
    """The detector; `export` makes its head compute the places from the size of the image."""
    detector = DetectionModel("yolo11n.yaml", verbose=False).fuse()
    detector.model[-1].dynamic = True
    return Boxes(detector)
