"""What several verbs of the command have in common: their options, and how they speak to a person."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.defaults import DEFAULT_TIMEOUT_S

if TYPE_CHECKING:
    from graphkiln_client import Client

Url = Annotated[
    str, typer.Option(help="http://HOST:PORT or grpc://HOST:PORT; https and grpcs with TLS.", envvar="GRAPHKILN_URL")
]
Headers = Annotated[
    list[str] | None,
    typer.Option("--header", help="Sent with every request, e.g. a token; may be repeated.", metavar="NAME:TEXT"),
]
CaFile = Annotated[
    Path | None, typer.Option(help="Certificate authorities to trust.", show_default="the system's", metavar="FILE")
]
Timeout = Annotated[float, typer.Option(help="Seconds that one request may take.", min=0.001)]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder for lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]


def connect(url: str, header: list[str] | None, ca_file: Path | None, timeout_s: float = DEFAULT_TIMEOUT_S) -> Client:
    """A client as the options ask for it.

    Raises:
        InvalidInput: The URL, a header or the CA file cannot be used.
    """
    from graphkiln_client import Client

    pairs = [text.partition(":") for text in header or ()]
    if any(not colon for _, colon, _ in pairs):
        raise InvalidInput("--header: expected NAME:TEXT", hint="for example --header 'Authorization: Bearer ...'")
    headers = {name.strip(): text.strip() for name, _, text in pairs}
    return Client(url, headers=headers, ca_file=ca_file, timeout_s=timeout_s)


class _StderrHandler(logging.Handler):
    """Shows what the packages log as `say` shows the command's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())


def log_to_stderr() -> None:
    """Shows what the loggers `graphkiln.*` tell, a line each; the root logger and its handlers stay as they are."""
    logger = logging.getLogger("graphkiln")
    logger.setLevel(logging.INFO)
    logger.handlers = [_StderrHandler()]


def say(line: str) -> None:
    """One line on stderr, where it does not disturb what programs read."""
    typer.echo(f"graphkiln: {line}", err=True)
