"""`graphkiln detect`: boxes, labels and scores of objects in images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_csv, print_json, print_table
from graphkiln.cli.image_arguments import (
    BatchSize,
    Concurrency,
    Encoded,
    Images,
    check_formats,
    drawing_paths,
    expand_folders,
    report_failures,
    save_drawing,
    send_images,
)
from graphkiln.cli.options import AsCsv, AsJson, ModelName, ModelVersion

if TYPE_CHECKING:
    from graphkiln_client import Detection

    Found = Sequence[tuple[Path, tuple[Detection, ...]]]

_CORNERS = ("x1", "y1", "x2", "y2")


@with_connection()
def detect(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    threshold: Annotated[
        float | None, typer.Option(help="Minimum score of a detection.", show_default="the model's", min=0.0, max=1.0)
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw the boxes into a copy of the image; a folder for several.", metavar="OUT")
    ] = None,
    batch_size: BatchSize = 8,
    concurrency: Concurrency = 4,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Detect objects in images: boxes in pixels, labels, scores.

    Exit code 1 when an image failed; the results of the others are shown.
    """
    paths = expand_folders(images)
    check_formats(paths, draw, as_json=as_json, as_csv=as_csv)
    targets = drawing_paths(paths, draw)
    found, failures = send_images(
        connection, (model, version, encoded), paths, (batch_size, concurrency),
        lambda served, options: served.detect_many(paths, score_threshold=threshold, **options),
    )  # fmt: skip
    if as_json:
        rows = [{"source": str(path), "detections": [each.to_dict() for each in things]} for path, things in found]
        print_json(rows)
    elif as_csv:
        print_csv(("source", "rank", "index", "label", "score", *_CORNERS), _csv_rows(found))
    elif found:
        print_table(("image", "label", "score", *_CORNERS), _table_rows(found))
    if draw:
        _draw(found, targets)
    report_failures(failures)


def _draw(found: Found, targets: dict[Path, Path]) -> None:
    from graphkiln.cli.drawing import draw_detections
    from graphkiln_backend.images.decoding import open_image

    for path, things in found:
        save_drawing(draw_detections(open_image(path), things), targets[path])


def _table_rows(found: Found) -> Iterator[list[str]]:
    for path, things in found:
        name = path.name
        for each in things:
            yield [
                name,
                each.label or str(each.index),
                f"{each.score:.4f}",
                *(f"{edge:.1f}" for edge in astuple(each.box)),
            ]
            name = ""  # once for each image
        if not things:
            yield [name, "nothing found"]


def _csv_rows(found: Found) -> Iterator[Sequence[object]]:
    """Yield a row for each detection; columns are the same for all models."""
    for path, things in found:
        for rank, each in enumerate(things, 1):
            yield (path, rank, each.index, each.label, each.score, *astuple(each.box))
