"""`graphkiln detect`: images in, boxes out."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json
from graphkiln.cli.image_arguments import (
    FORMS,
    Encoded,
    check_formats,
    drawing_paths,
    expand_folders,
    report_failures,
    save_drawing,
    show_progress,
    split_errors,
)
from graphkiln.cli.options import AsJson

if TYPE_CHECKING:
    from graphkiln_client import Detection

    Found = Sequence[tuple[Path, tuple[Detection, ...]]]


@with_connection()
def detect(
    images: Annotated[list[Path], typer.Argument(help="Image files or folders of them.", metavar="IMAGE")],
    model: Annotated[str, typer.Option(help="Model name.")],
    version: Annotated[str, typer.Option(help="Model version.", show_default="the server's choice")] = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    threshold: Annotated[
        float | None, typer.Option(help="Least score of a detection.", show_default="the model's", min=0.0, max=1.0)
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw the boxes into a copy of the image; a folder for several.", metavar="OUT")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Most images in one request.", min=1)] = 8,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 4,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
) -> None:
    """Find things in images: boxes in pixels, labels, scores.

    Exit code 1 when an image failed; the others are answered all the same.
    """
    paths = expand_folders(images)
    check_formats(paths, draw, as_json=as_json, as_csv=as_csv)
    targets = drawing_paths(paths, draw)
    with connection.connect() as client, show_progress(len(paths), "detecting") as progress:
        answers = client.model(model, version, images=FORMS[encoded]).detect_many(
            paths,
            score_threshold=threshold,
            batch_size=batch_size,
            concurrency=concurrency,
            on_error="return",
            progress=progress,
        )
        found, failures = split_errors(paths, list(answers))
    if as_json:
        rows = [{"source": str(path), "detections": [each.to_dict() for each in things]} for path, things in found]
        print_json(rows)
    elif as_csv:
        _write_csv(found)
    elif found:
        _print_table(found)
    for path, things in found if draw else ():
        _draw(path, things, targets[path])
    report_failures(failures)


def _draw(path: Path, things: Sequence[Detection], target: Path) -> None:
    from graphkiln.cli.drawing import draw_detections
    from graphkiln_backend.images.decoding import open_image

    save_drawing(draw_detections(open_image(path), things), target)


def _print_table(found: Found) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "label", "score", "x1", "y1", "x2", "y2")
    for path, things in found:
        name = escape(path.name)
        for place, each in enumerate(things):
            box = [f"{value:.1f}" for value in (each.box.x1, each.box.y1, each.box.x2, each.box.y2)]
            table.add_row("" if place else name, escape(each.label or str(each.index)), f"{each.score:.4f}", *box)
        if not things:
            table.add_row(name, "nothing found", *[""] * 5)
    Console().print(table)


def _write_csv(found: Found) -> None:
    """One row for each detection, with the same columns for every model."""
    writer = csv.writer(sys.stdout)
    writer.writerow(["source", "rank", "index", "label", "score", "x1", "y1", "x2", "y2"])
    for path, things in found:
        for rank, each in enumerate(things, 1):
            box = (each.box.x1, each.box.y1, each.box.x2, each.box.y2)
            writer.writerow([path, rank, each.index, each.label, each.score, *box])
