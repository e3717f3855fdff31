"""`graphkiln classify`: pictures in, labelled answers out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.options import DEFAULT_URL, Url
from graphkiln.graph.errors import ClientError, InvalidInput

if TYPE_CHECKING:
    from graphkiln.client import Result

_SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


def classify(
    images: Annotated[list[Path], typer.Argument(help="Picture files or folders of them.", metavar="IMAGE")],
    model: Annotated[str, typer.Option(help="Model name.")],
    version: Annotated[str, typer.Option(help="Model version; the server chooses when empty.")] = "",
    url: Url = DEFAULT_URL,
    top_k: Annotated[int, typer.Option(help="Answers per picture, best first.", min=1)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Classify pictures with a served model: labelled top-k, best first.

    Exit code 1 when any picture failed; the others are answered all the same.
    """
    from graphkiln.client import Client

    paths = _expanded(images)
    with Client(url) as client:
        answers = list(client.model(model, version).classify_many(paths, top_k=top_k, on_error="return"))
    failures = [(path, answer) for path, answer in zip(paths, answers, strict=True) if isinstance(answer, ClientError)]
    if len({str(error) for _, error in failures}) == 1 and len(failures) == len(answers):
        raise failures[0][1]  # nothing worked, for one reason: say it once
    results = [answer for answer in answers if not isinstance(answer, ClientError)]
    if as_json:
        typer.echo(json.dumps([result.to_dict() for result in results], indent=2))
    else:
        _show(results)
    for path, error in failures:
        typer.echo(f"graphkiln: {path}: {error}", err=True)
    if failures:
        raise typer.Exit(1)


def _expanded(images: list[Path]) -> list[Path]:
    """Files as they are; folders as the pictures in them, sorted."""
    paths: list[Path] = []
    for image in images:
        if not image.is_dir():
            paths.append(image)
            continue
        found = sorted(path for path in image.rglob("*") if path.suffix.lower() in _SUFFIXES)
        if not found:
            raise InvalidInput(f"folder {image} holds no picture", hint=f"known endings: {' '.join(sorted(_SUFFIXES))}")
        paths += found
    return paths


def _show(results: list[Result]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("image", "label", "index", "score", "latency")
    for result in results:
        for rank, answer in enumerate(result.classifications):
            table.add_row(
                Path(result.source).name if rank == 0 else "",
                answer.label or "-",
                str(answer.index),
                f"{answer.score:.4f}",
                f"{result.latency_ms:.1f} ms" if rank == 0 else "",
            )
    Console().print(table)
