"""`graphkiln models`: list the models of a server."""

from __future__ import annotations

from dataclasses import asdict

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json, print_table
from graphkiln.cli.options import AsJson


@with_connection(timeout_s=None, admin=True)
def models(connection: ConnectionOptions = DEFAULT_CONNECTION, as_json: AsJson = False) -> None:
    """List the model versions of a server and their states.

    Exit code 1 if one of them is not ready.
    """
    with connection.connect() as client:
        served = client.models()
    if as_json:
        print_json([asdict(model) for model in served])
    else:
        rows = [(model.name, model.version or "-", model.state or "not loaded", model.reason) for model in served]
        print_table(("model", "version", "state", "reason"), rows, empty="the server has no models")
    raise typer.Exit(0 if all(model.ready for model in served) else 1)
