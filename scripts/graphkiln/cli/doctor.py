"""`graphkiln doctor`: find what would go wrong if a server were started on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import print_json
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
            help="Folder of models to look through, or s3:// ... to list; may be given several times.",
            envvar="GRAPHKILN_MODEL_STORE",
            metavar="STORE",
            show_default="./model_repository, if it is there",
        ),
    ] = None,
    cache: Cache = "",
    host: Annotated[
        str, typer.Option(help="Address that `serve` would listen on.", envvar="GRAPHKILN_HOST", metavar="ADDRESS")
    ] = "127.0.0.1",
    as_json: AsJson = False,
) -> None:
    """Examine this machine: what would keep it from serving?

    Nothing is changed. Flags for tritonserver may be added as for `serve`, such as --http-port=9000.
    Exit code 1 when something would stop the server or keep a model from being served.
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
        console.print(f"errors: {errors}, warnings: {warnings}: `graphkiln serve` would not serve everything")
    else:
        console.print(f"errors: 0, warnings: {warnings}: nothing here would stop `graphkiln serve`")


def _table(examination: Examination) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table("check", "", "what was found", show_lines=False)
    shown = ""
    for finding in examination.findings:
        text = Text(f"{finding.subject}: {finding.message}", overflow="fold")
        if finding.hint:
            text.append(f"\n-> {finding.hint}", style="bold")
        name = finding.check if finding.check != shown else ""
        table.add_row(name, Text(finding.level, style=_STYLES[finding.level]), text)
        shown = finding.check
    return table
