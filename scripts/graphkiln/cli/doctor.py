"""`graphkiln doctor`: check this machine before a server is started."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import make_table, print_json
from graphkiln.cli.options import AsJson, Cache

if TYPE_CHECKING:
    from rich.table import Table

    from graphkiln.doctor.examination import Examination

_DEFAULT_STORE = Path("model_repository")
_STYLES = {"ok": "green", "warning": "yellow", "error": "bold red"}
_WIDTH = 80


def doctor(
    context: typer.Context,
    model_store: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of models to examine, or s3:// ... to list; may be repeated.",
            envvar="GRAPHKILN_MODEL_STORE",
            metavar="STORE",
            show_default="./model_repository, if it exists",
        ),
    ] = None,
    cache: Cache = "",
    host: Annotated[
        str, typer.Option(help="Listening address for `serve`.", envvar="GRAPHKILN_HOST", metavar="ADDRESS")
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Examine this machine for problems with serving.

    Nothing is changed. Flags for tritonserver are accepted as in `serve`, such as --http-port=9000.
    Exit code 1 when the server would not start or a model would not be served.
    """
    from graphkiln.doctor.examination import Level, Request, examine
    from graphkiln_backend.storage.address import parse_store

    named = [parse_store(text) for text in model_store or ()] or ([_DEFAULT_STORE] if _DEFAULT_STORE.is_dir() else [])
    examination = examine(
        Request(
            stores=tuple(store for store in named if isinstance(store, Path)),
            remote=tuple(store for store in named if not isinstance(store, Path)),
            cache=cache,
            host=host,
            arguments=tuple(context.args),
        )
    )
    if as_json:
        print_json(examination.to_document())
    else:
        _show(examination)
    raise typer.Exit(1 if examination.level is Level.ERROR else 0)


def _show(examination: Examination) -> None:
    from rich.console import Console

    from graphkiln.doctor.examination import Level

    console = Console()
    console.width = max(console.width, _WIDTH) if console.is_terminal else _WIDTH
    console.print(_table(examination))
    errors, warnings = examination.count(Level.ERROR), examination.count(Level.WARNING)
    if errors:
        console.print(f"errors: {errors}, warnings: {warnings}: `graphkiln serve` would fail, at least for some models")
    else:
        console.print(f"errors: 0, warnings: {warnings}: `graphkiln serve` would start")


def _table(examination: Examination) -> Table:
    from rich.text import Text

    rows, shown = [], ""
    for finding in examination.findings:
        text = Text(f"{finding.subject}: {finding.message}")
        if finding.hint:
            text.append(f"\n-> {finding.hint}", style="bold")
        name = finding.check if finding.check != shown else ""
        rows.append((name, Text(finding.level, style=_STYLES[finding.level]), text))
        shown = finding.check
    return make_table(("check", "", "finding"), rows)
