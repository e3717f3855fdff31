"""`graphkiln embed`: images in, vectors out: printed, or with `--out` written to a Parquet file as they come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_csv, print_json, print_table, say
from graphkiln.cli.image_arguments import (
    FORMS,
    BatchSize,
    Concurrency,
    Encoded,
    Images,
    check_formats,
    expand_folders,
    report_failures,
    show_progress,
    split_errors,
)
from graphkiln.cli.options import AsJson, ModelName, ModelVersion
from graphkiln.scoring.extra import check_extra
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotReady

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphkiln_client import Model
    from graphkiln_client.preparing import Form

    Vector = npt.NDArray[np.float32]

# Endings of files that would be taken for something else than they are.
_OTHER_FORMATS = (".csv", ".json", ".jsonl", ".npy", ".npz", ".txt", ".tsv")


@with_connection()
def embed(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
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

    def answer(served: Model, paths: Sequence[Path]) -> Iterator[Vector | ClientError]:
        with show_progress(len(paths), "embedding") as progress:
            yield from served.embed_many(
                paths, normalize=normalize or None,
                batch_size=batch_size, concurrency=concurrency, on_error="return", progress=progress,
            )  # fmt: skip

    if out:
        _check_out(out, printed=as_json or as_csv)
        _save(images, out, connection, (model, version, FORMS[encoded]), answer)
        return
    paths = expand_folders(images)
    with connection.connect() as client:
        served = client.model(model, version, images=FORMS[encoded])
        found, failures = split_errors(paths, list(answer(served, paths)))
    if as_json:
        print_json([{"source": str(path), "vector": vector.tolist()} for path, vector in found], indent=None)
    elif as_csv and found:
        columns = ["source", *(f"v{place}" for place in range(len(found[0][1])))]
        print_csv(columns, ([path, *vector.tolist()] for path, vector in found))
    elif found:
        _print_table(found)
    report_failures(failures)


def _print_table(found: Sequence[tuple[Path, Vector]]) -> None:
    rows = []
    for path, vector in found:
        begin = " ".join(f"{value:.4f}" for value in vector[:4])
        length = float((vector.astype("float64") ** 2).sum() ** 0.5)
        rows.append((path.name, str(len(vector)), f"{length:.4f}", begin))
    print_table(("image", "features", "length", "begins with"), rows)


def _check_out(out: Path, *, printed: bool) -> None:
    if printed:
        raise InvalidInput("--out writes a file: leave out --json and --csv")
    if out.suffix.lower() in _OTHER_FORMATS:
        hint = f"--out {out.with_suffix('.parquet')}"
        raise InvalidInput(f"--out writes Parquet, and {out} is named otherwise", hint=hint)
    check_extra("embed --out", ["pyarrow"])


def _save(
    images: Sequence[Path],
    out: Path,
    connection: ConnectionOptions,
    served: tuple[str, str, Form],
    answer: Callable[[Model, Sequence[Path]], Iterator[Vector | ClientError]],
) -> None:
    """Write the vectors of images, each once, sorted by path; all of them come from one version.

    Args:
        images: Files, and folders of them.
        out: The file; replaced when the new one is whole.
        connection: To the server.
        served: Name of the model, its version or "", and how images travel.
        answer: Yields a vector or an error for each image.
    """
    from graphkiln.cli.vector_file import VectorWriter, check_replaceable, identify, replaced_file

    paths = sorted(set(expand_folders(images)))
    check_replaceable(out)
    failures = []
    with _ending_in_order(), replaced_file(out) as file, connection.connect() as client:
        pinned, origin = identify(client, *served)
        with VectorWriter(file, origin) as writer:
            for path, vector in zip(paths, answer(pinned, paths), strict=True):
                if isinstance(vector, ClientError):
                    failures.append((path, vector))
                else:
                    writer.add(path, vector)
        if not writer.rows:
            split_errors([path for path, _ in failures], [error for _, error in failures])
            report_failures(failures)
        _, now = identify(client, origin.model, origin.version)
        if now != origin:  # another version of the same number, whose vectors differ
            message = f"{origin} was replaced while it embedded, by {now}: nothing is written"
            raise ModelNotReady(message, hint="embed the images again")
    say(f"{out}: {writer.rows} vectors of {writer.features} features, {_lengths(writer.lengths)}, by {origin}")
    report_failures(failures)


@contextmanager
def _ending_in_order() -> Iterator[None]:
    """End the block on SIGTERM or SIGHUP, too: the unfinished file would stay, under a hidden name."""
    from graphkiln_backend.system.signals import Stopped, stopping_in_order

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
