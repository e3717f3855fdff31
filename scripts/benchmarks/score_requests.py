"""What is requested of a run that is measured; imports little, so that its memory is its own."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.scoring.request import ScoreRequest

# Of torchvision's weights.
PREPROCESS = Preprocess(
    resize=232, crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bilinear"
)


def request_for(model: Path, source: Path, destination: Path, cache: Path, cores: int, *, rows: int) -> ScoreRequest:
    """Top-5 of a folder of images.

    Args:
        model: The model's folder.
        source: The images.
        destination: Where the answers go.
        cache: Of artifacts.
        cores: Of each worker.
        rows: Of a unit; few, where a run is short and its last units must not be most of it.
    """
    return ScoreRequest(
        source=str(source),
        model=model,
        destination=str(destination),
        backends=frozenset({"graphkiln"}),
        cores_per_worker=cores,
        cache=cache,
        rows_per_unit=rows,
    )
