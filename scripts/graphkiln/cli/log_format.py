"""The option `--log-format`, which `serve` shares with tritonserver."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from graphkiln.cli.console import log_as_json

_VARIABLE = "GRAPHKILN_LOG_FORMAT"
"""The instances read it, too (`triton.environment`); that module is not imported before it is needed."""
_TRITONS = ("default", "ISO8601")
_OURS = ("text", "json")


def tritons_flags(log_format: str) -> list[str]:
    """What tritonserver is told of it."""
    return [f"--log-format={log_format}"] if log_format in _TRITONS else []


def _choose(context: typer.Context, value: str) -> str:
    """Turns standard error into JSON at once, so that what other options do wrong is JSON, too.

    Raises:
        BadParameter: There is no such format.
    """
    if value not in (*_OURS, *_TRITONS):
        raise typer.BadParameter(f"'{value}' is none of {', '.join((*_OURS, *_TRITONS))}")
    if value == "json" and not context.resilient_parsing:
        os.environ[_VARIABLE] = value
        log_as_json()
    return value


LogFormatOption = Annotated[
    str,
    typer.Option(
        help="text; json: each line of the log is an object, and failed requests are logged with their ids; "
        "default or ISO8601: tritonserver's own, of its lines.",
        envvar=_VARIABLE,
        metavar="FORMAT",
        callback=_choose,
        is_eager=True,
    ),
]
