"""`graphkiln segment`: images in, a class for each pixel out."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from graphkiln_backend.graph.errors import ClientError

if TYPE_CHECKING:
    from graphkiln_client import SegmentedImage

# What is printed of an image: its class map, a byte or four for each pixel, would fill the memory for a folder.
Document = Mapping[str, Any]
Found = Sequence[tuple[Path, Document]]


@with_connection()
def segment(
    images: Annotated[list[Path], typer.Argument(help="Image files or folders of them.", metavar="IMAGE")],
    model: Annotated[str, typer.Option(help="Model name.")],
    version: Annotated[str, typer.Option(help="Model version.", show_default="the server's choice")] = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    draw: Annotated[
        Path | None, typer.Option(help="Tint a copy of the image by its classes; a folder for several.", metavar="OUT")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Most images in one request.", min=1)] = 8,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 4,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
) -> None:
    """Find the class of every pixel of images.

    --json holds the masks as run lengths. Exit code 1 when an image failed; the others are answered all the same.
    """
    paths = expand_folders(images)
    check_formats(paths, draw, as_json=as_json, as_csv=as_csv)
    targets = drawing_paths(paths, draw)
    with connection.connect() as client, show_progress(len(paths), "segmenting") as progress:
        answers = client.model(model, version, images=FORMS[encoded]).segment_many(
            paths, batch_size=batch_size, concurrency=concurrency, on_error="return", progress=progress
        )
        pairs = zip(paths, answers, strict=True)
        described = [_describe(path, answer, targets.get(path), whole=as_json) for path, answer in pairs]
    found, failures = split_errors(paths, described)
    if as_json:
        print_json([{"source": str(path), **document} for path, document in found])
    elif as_csv:
        _write_csv(found)
    elif found:
        _print_table(found)
    report_failures(failures)


def _describe(
    path: Path, answer: SegmentedImage | ClientError, target: Path | None, *, whole: bool
) -> Document | ClientError:
    """Describe an image's result, with the masks or without; draw it, too, if requested."""
    if isinstance(answer, ClientError):
        return answer
    if target:
        _draw(path, answer, target)
    return answer.to_dict() if whole else {"segments": _shares(answer)}


def _shares(image: SegmentedImage) -> list[Document]:
    return [{"label": image.label(index), "index": index, "share": image.share(index)} for index in image.present]


def _draw(path: Path, segmented: SegmentedImage, target: Path) -> None:
    from graphkiln.cli.drawing import draw_segments
    from graphkiln_backend.images.decoding import open_image

    save_drawing(draw_segments(open_image(path), segmented), target)


def _print_table(found: Found) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "label", "index", "share")
    for path, document in found:
        for place, segment in enumerate(document["segments"]):
            name = "" if place else escape(path.name)
            label, index, share = segment["label"] or "-", segment["index"], segment["share"]
            table.add_row(name, escape(label), str(index), f"{100 * share:.1f} %")
    Console().print(table)


def _write_csv(found: Found) -> None:
    """One row for each class of an image, with the share of its pixels."""
    writer = csv.writer(sys.stdout)
    writer.writerow(["source", "index", "label", "share"])
    for path, document in found:
        for segment in document["segments"]:
            writer.writerow([path, segment["index"], segment["label"], segment["share"]])
