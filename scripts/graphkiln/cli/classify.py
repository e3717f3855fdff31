"""`graphkiln classify`: labels of images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
    expand_folders,
    report_failures,
    send_images,
)
from graphkiln.cli.options import AsCsv, AsJson, ModelName, ModelVersion

if TYPE_CHECKING:
    from graphkiln_client import Result

_CSV = ("source", "model", "version", "output", "position", "rank", "index", "label", "score")


@with_connection()
def classify(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    top_k: Annotated[int, typer.Option(help="Labels per image, best first.", min=1)] = 5,
    softmax: Annotated[bool, typer.Option("--softmax", help="Convert scores to probabilities.")] = False,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Classify images with a served model: labeled top-k, best first.

    Exit code 1 when an image failed; the others are classified.
    """
    check_formats([], None, as_json=as_json, as_csv=as_csv)
    paths = expand_folders(images)
    answered, failures = send_images(
        connection, (model, version, encoded), paths, (batch_size, concurrency),
        lambda served, options: served.classify_many(paths, top_k=top_k, softmax=softmax, **options),
    )  # fmt: skip
    results = [result for _, result in answered]
    if as_json:
        print_json([result.to_dict() for result in results])
    elif as_csv:
        print_csv(_CSV, _csv_rows(results))
    elif results:
        _print_table(results)
    report_failures(failures)


def _print_table(results: Sequence[Result]) -> None:
    several = any(len(result.outputs) > 1 for result in results)
    placed = any(found.position for result in results for ranking in result.outputs.values() for found in ranking)
    extra = [*(["output"] if several else []), *(["position"] if placed else [])]
    rows = []
    for result in results:
        name, latency = Path(result.source).name, f"{result.latency_ms:.1f} ms"
        for output, ranking in result.outputs.items():
            for found in ranking:
                where = [*([output] if several else []), *([str(found.position)] if placed else [])]
                rows.append([name, *where, found.label or "-", str(found.index), f"{found.score:.4f}", latency])
                name = latency = ""  # once for each image
    print_table(["image", *extra, "label", "index", "score", "latency"], rows)


def _csv_rows(results: Sequence[Result]) -> Iterator[Sequence[object]]:
    """Yield a row for each label; columns are the same for all models."""
    for result in results:
        for output, ranking in result.outputs.items():
            ranks: dict[tuple[int, ...], int] = {}
            for found in ranking:
                rank = ranks[found.position] = ranks.get(found.position, 0) + 1
                position = "/".join(map(str, found.position))
                served = (result.source, result.model, result.version, output, position)
                yield (*served, rank, found.index, found.label, found.score)
