"""`graphkiln embed`: images in, vectors out."""

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
    expand_folders,
    report_failures,
    show_progress,
    split_errors,
)
from graphkiln.cli.options import AsJson
from graphkiln.cli.vectors import save_vectors
from graphkiln_backend.graph.errors import InvalidInput

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Found = Sequence[tuple[Path, npt.NDArray[np.float32]]]

_OTHER_FORMATS = (".csv", ".json", ".jsonl", ".npy", ".npz", ".txt", ".tsv")
"""Endings of files that would be taken for something else than they are."""


@with_connection()
def embed(
    images: Annotated[list[Path], typer.Argument(help="Image files or folders of them.", metavar="IMAGE")],
    model: Annotated[str, typer.Option(help="Model name.")],
    version: Annotated[str, typer.Option(help="Model version.", show_default="the server's choice")] = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    batch_size: Annotated[int, typer.Option(help="Most images in one request.", min=1)] = 16,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 8,
    out: Annotated[
        Path | None, typer.Option(help="Write a Parquet file for `graphkiln similar` instead.", metavar="FILE")
    ] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Divide vectors by their length.")] = False,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, a column for each feature.")] = False,
) -> None:
    """Turn images into vectors.

    --json and --csv hold all of them. Exit code 1 when an image failed; the others are answered all the same.
    """
    check_formats([], None, as_json=as_json, as_csv=as_csv)
    if out:
        if as_json or as_csv:
            raise InvalidInput("--out writes a file: leave out --json and --csv")
        if out.suffix.lower() in _OTHER_FORMATS:
            hint = f"--out {out.with_suffix('.parquet')}"
            raise InvalidInput(f"--out writes Parquet, and {out} is named otherwise", hint=hint)
        save_vectors(
            images,
            out,
            connection,
            (model, version),
            form=FORMS[encoded],
            normalize=normalize or None,
            batch_size=batch_size,
            concurrency=concurrency,
        )
        return
    paths = expand_folders(images)
    with connection.connect() as client, show_progress(len(paths), "embedding") as progress:
        answers = client.model(model, version, images=FORMS[encoded]).embed_many(
            paths,
            normalize=normalize or None,
            batch_size=batch_size,
            concurrency=concurrency,
            on_error="return",
            progress=progress,
        )
        found, failures = split_errors(paths, list(answers))
    if as_json:
        print_json([{"source": str(path), "vector": vector.tolist()} for path, vector in found], indent=None)
    elif as_csv:
        _write_csv(found)
    elif found:
        _print_table(found)
    report_failures(failures)


def _print_table(found: Found) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("image", "features", "length", "begins with")
    for path, vector in found:
        begin = " ".join(f"{value:.4f}" for value in vector[:4])
        length = float((vector.astype("float64") ** 2).sum() ** 0.5)
        table.add_row(escape(path.name), str(len(vector)), f"{length:.4f}", begin)
    Console().print(table)


def _write_csv(found: Found) -> None:
    writer = csv.writer(sys.stdout)
    if found:
        writer.writerow(["source", *(f"v{place}" for place in range(len(found[0][1])))])
    for path, vector in found:
        writer.writerow([path, *vector.tolist()])
