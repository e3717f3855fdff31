"""What several verbs of the command have in common: their options, and how they speak to a person."""

from __future__ import annotations

from typing import Annotated

import typer

DEFAULT_URL = "http://localhost:8000"

Url = Annotated[str, typer.Option(help="http://HOST:PORT or grpc://HOST:PORT.", envvar="GRAPHKILN_URL")]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder for lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]


def say(line: str) -> None:
    """One line on stderr, where it does not disturb what programs read."""
    typer.echo(f"graphkiln: {line}", err=True)
