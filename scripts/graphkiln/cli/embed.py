"""`graphkiln embed`: images in, vectors out."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json, say
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
from graphkiln.scoring.extra import check_extra
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotReady

if TYPE_CHECKING:
    from graphkiln_client import Client
    from graphkiln_client.encoded_images import Form


# `graphkiln embed --out`: vectors of any number of images, written as they come.

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphkiln.cli.vector_file import Origin, VectorWriter
    from graphkiln_client import Client
    from graphkiln_client.encoded_images import Form

    Answer = npt.NDArray[np.float32] | ClientError
    Failures = list[tuple[Path, ClientError]]


def save_vectors(
    images: Sequence[Path],
    out: Path,
    connection: ConnectionOptions,
    model: tuple[str, str],
    *,
    form: Form,
    normalize: bool | None,
    batch_size: int,
    concurrency: int,
) -> None:
    """Write the vectors of images, each once, sorted by path; all of them come from one version.

    Args:
        images: Files, and folders of them.
        out: The file; written over when the new one is whole.
        connection: To the server.
        model: Its name, and its version or nothing.
        form: How images travel.
        normalize: Divide vectors by their length; None for the model's default.
        batch_size: Most images in one request.
        concurrency: Most requests at a time.

    Raises:
        EngineUnavailable: What writes Parquet is not installed.
        InvalidInput: The file cannot be written, or something else is in its place.
        ClientError: Nothing could be embedded, or the version was replaced meanwhile.
        typer.Exit: Some images failed, which was reported; the others are in the file.
    """
    check_extra("embed --out", ["pyarrow"])
    from graphkiln.cli.vector_file import VectorWriter, check_replaceable, identify, replaced_file

    paths = sorted(set(expand_folders(images)))
    check_replaceable(out)
    with _ending_in_order(), replaced_file(out) as file, connection.connect() as client:
        pinned, origin = identify(client, *model, form)
        with VectorWriter(file, origin) as writer, show_progress(len(paths), "embedding") as progress:
            answers = pinned.embed_many(
                paths,
                normalize=normalize,
                batch_size=batch_size,
                concurrency=concurrency,
                on_error="return",
                progress=progress,
            )
            failures = list(_write(zip(paths, answers, strict=True), writer))
        _check_any(writer.rows, failures)
        _check_unchanged(client, origin)
    say(f"{out}: {writer.rows} vectors of {writer.features} features, {_lengths(writer.lengths)}, by {origin}")
    report_failures(failures)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """End the block where SIGTERM or SIGHUP comes, too: the unfinished file would stay, under a hidden name."""
    from graphkiln_backend.server.signals import Stopped, stopping_in_order

    try:
        with stopping_in_order():
            yield
    except Stopped as stopped:
        raise typer.Exit(stopped.exit_code) from None


def _lengths(found: Sequence[float]) -> str:
    """Report whether vectors are normalized: some searches assume it."""
    if not found:
        return "none of which is finite"
    shortest, longest = (f"{length:.4g}" for length in found)
    return f"of length {shortest}" if shortest == longest else f"of lengths from {shortest} to {longest}"


def _write(pairs: Iterable[tuple[Path, Answer]], writer: VectorWriter) -> Iterator[tuple[Path, ClientError]]:
    for path, answer in pairs:
        if isinstance(answer, ClientError):
            yield path, answer
        else:
            writer.add(path, answer)


def _check_any(rows: int, failures: Failures) -> None:
    """End the command where every image failed."""
    if not rows:
        split_errors([path for path, _ in failures], [error for _, error in failures])
        report_failures(failures)
        raise typer.Exit(1)


def _check_unchanged(client: Client, origin: Origin) -> None:
    """Check that the version was not replaced by another of the same number, whose vectors are others."""
    from graphkiln.cli.vector_file import identify

    _, now = identify(client, origin.model, origin.version)
    if now != origin:
        message = f"{origin} was replaced while it embedded, by {now}: nothing is written"
        raise ModelNotReady(message, hint="embed the images again")


if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Found = Sequence[tuple[Path, npt.NDArray[np.float32]]]

# Endings of files that would be taken for something else than they are.
_OTHER_FORMATS = (".csv", ".json", ".jsonl", ".npy", ".npz", ".txt", ".tsv")


@with_connection()
def embed(
    images: Annotated[list[Path], typer.Argument(help="Image files or folders of them.", metavar="IMAGE")],
    model: Annotated[str, typer.Option(help="Model name.")],
    version: Annotated[str, typer.Option(help="Model version.", show_default="the server's choice")] = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    batch_size: Annotated[int, typer.Option(help="Most images in one request.", min=1)] = 16,
    concurrency: Annotated[int, typer.Option(help="Concurrent requests.", min=1)] = 8,
    out: Annotated[Path | None, typer.Option(help="Write a Parquet file instead.", metavar="FILE")] = None,
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
