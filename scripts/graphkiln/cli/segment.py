"""`graphkiln segment`: the class of each pixel of images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
from graphkiln_backend.graph.errors import ClientError

if TYPE_CHECKING:
    from graphkiln_client import Model, SegmentedImage

Document = Mapping[str, Any]


@with_connection()
def segment(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    draw: Annotated[
        Path | None,
        typer.Option(help="Tint a copy of the image by its classes; a folder for several.", metavar="OUT"),
    ] = None,
    batch_size: BatchSize = 8,
    concurrency: Concurrency = 4,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Segment images: the class of every pixel.

    --json contains masks as run lengths. Exit code 1 when an image failed; the results of the others are shown.
    """
    paths = expand_folders(images)
    check_formats(paths, draw, as_json=as_json, as_csv=as_csv)
    targets = drawing_paths(paths, draw)

    def describe(served: Model, options: dict[str, Any]) -> Iterator[Document | ClientError]:
        # one by one: the class maps of a folder may exceed the memory
        for path, answer in zip(paths, served.segment_many(paths, **options), strict=True):
            if isinstance(answer, ClientError):
                yield answer
            else:
                yield _describe(path, answer, targets.get(path), whole=as_json)

    found, failures = send_images(connection, (model, version, encoded), paths, (batch_size, concurrency), describe)
    segments = [(path, each) for path, document in found for each in document["segments"]]
    if as_json:
        print_json([{"source": str(path), **document} for path, document in found])
    elif as_csv:
        rows = [(path, each["index"], each["label"], each["share"]) for path, each in segments]
        print_csv(("source", "index", "label", "share"), rows)
    elif found:
        _print_table(segments)
    report_failures(failures)


def _describe(path: Path, answer: SegmentedImage, target: Path | None, *, whole: bool) -> Document:
    """Describe the classes of an image, with masks if `whole`; write the drawing if there is a target."""
    if target:
        from graphkiln.cli.drawing import draw_segments
        from graphkiln_backend.images.decoding import open_image

        save_drawing(draw_segments(open_image(path), answer), target)
    if whole:
        return answer.to_dict()
    shares = [{"label": answer.label(index), "index": index, "share": answer.share(index)} for index in answer.present]
    return {"segments": shares}


def _print_table(segments: list[tuple[Path, Document]]) -> None:
    rows, last = [], None
    for path, each in segments:
        share = f"{100 * each['share']:.1f} %"
        rows.append(["" if path is last else path.name, each["label"] or "-", str(each["index"]), share])
        last = path
    print_table(("image", "label", "index", "share"), rows)
