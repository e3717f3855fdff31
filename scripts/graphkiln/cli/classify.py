"""`graphkiln classify`: images in, labels out."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json
from graphkiln.cli.image_arguments import (
    FORMS,
    Encoded,
    check_formats,
    expand_folders,
    report_failures,
    show_progress,
    split_errors,
)
from graphkiln.cli.options import AsJson

if TYPE_CHECKING:
    from graphkiln_client import Result


@with_connection()
def classify(
    images: Annotated[list[Path], typer.Argument(help="Image files or folders of them.", metavar="IMAGE")],
    model: Annotated[str, typer.Option(help="Model name.")],
    version: Annotated[str, typer.Option(help="Model version.", show_default="the server's choice")] = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    top_k: Annotated[int, typer.Option(help="Labels per image, best first.", min=1)] = 5,
    softmax: Annotated[bool, typer.Option("--softmax", help="Turn scores into probabilities.")] = False,
    batch_size: Annotated[int, typer.Option(help="Most images in one request.", min=1)] = 16,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 8,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of a table.")] = False,
) -> None:
    """Classify images with a served model: labeled top-k, best first.

    Exit code 1 when an image failed; the others are classified all the same.
    """
    check_formats([], None, as_json=as_json, as_csv=as_csv)
    paths = expand_folders(images)
    with (
        connection.connect() as client,
        show_progress(len(paths), "classifying") as progress,
    ):
        answers = client.model(model, version, images=FORMS[encoded]).classify_many(
            paths,
            top_k=top_k,
            softmax=softmax,
            batch_size=batch_size,
            concurrency=concurrency,
            on_error="return",
            progress=progress,
        )
        answered, failures = split_errors(paths, list(answers))
    results = [result for _, result in answered]
    if as_json:
        print_json([result.to_dict() for result in results])
    elif as_csv:
        _write_csv(results)
    elif results:
        _print_table(results)
    report_failures(failures)


def _print_table(results: list[Result]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    several = any(len(result.outputs) > 1 for result in results)
    rankings = [ranking for result in results for ranking in result.outputs.values()]
    placed = any(found.position for ranking in rankings for found in ranking)
    extra = [*(["output"] if several else []), *(["position"] if placed else [])]
    table = Table("image", *extra, "label", "index", "score", "latency")
    for result in results:
        first = True
        for output, classifications in result.outputs.items():
            for found in classifications:
                where = [*([output] if several else []), *([str(found.position)] if placed else [])]
                table.add_row(
                    escape(Path(result.source).name) if first else "",
                    *map(escape, (*where, found.label or "-", str(found.index), f"{found.score:.4f}")),
                    f"{result.latency_ms:.1f} ms" if first else "",
                )
                first = False
    Console().print(table)


def _write_csv(results: list[Result]) -> None:
    """One row for each label, with the same columns for every model."""
    writer = csv.writer(sys.stdout)
    writer.writerow(["source", "model", "version", "output", "position", "rank", "index", "label", "score"])
    for result in results:
        for output, classifications in result.outputs.items():
            ranks: dict[tuple[int, ...], int] = {}
            for found in classifications:
                rank = ranks[found.position] = ranks.get(found.position, 0) + 1
                position = "/".join(map(str, found.position))
                row = [result.source, result.model, result.version, output, position]
                writer.writerow([*row, rank, found.index, found.label, found.score])
