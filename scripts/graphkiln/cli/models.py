"""`graphkiln models`: what a server serves."""

from __future__ import annotations

import json
from dataclasses import asdict

import typer

from graphkiln.cli.options import AsJson, CaFile, Headers, Url, connect
from graphkiln_client.defaults import DEFAULT_URL


def models(
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
    header: Headers = None,
    ca_file: CaFile = None,
) -> None:
    """Show every model version that a server knows, and its state. Exit code 1 when one is not ready."""
    with connect(url, header, ca_file) as client:
        found = client.models()
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in found], indent=2))
    else:
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table

        table = Table("model", "version", "state", "reason")
        for model in found:
            table.add_row(*map(escape, (model.name, model.version or "-", model.state or "not loaded", model.reason)))
        Console().print(table if found else "the server knows no model")
    raise typer.Exit(0 if all(model.ready for model in found) else 1)
