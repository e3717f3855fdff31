"""`graphkiln health`: check that a server and its models are ready."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json
from graphkiln.cli.options import AsJson
from graphkiln_backend.graph.errors import ClientError, ModelNotReady

_POLL_S = 0.05
_TIMEOUT_S = 5.0


@with_connection(timeout_s=None, admin=True)
def health(
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the server to become ready.", min=0)] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Check that a server and all its models are ready.

    Exit code 0 if they are, otherwise 1.
    """
    deadline = time.monotonic() + wait
    with replace(connection, timeout=min(_TIMEOUT_S, wait or _TIMEOUT_S)).connect() as client:
        while True:
            is_last = time.monotonic() >= deadline
            try:
                report = client.health()
                if report.ready or is_last:
                    break
            except ClientError:
                if is_last:
                    raise
            time.sleep(_POLL_S)
    if as_json:
        print_json(asdict(report))
        raise typer.Exit(0 if report.ready else 1)
    if not report.ready:
        reasons = [f"{model.name} {model.version} is {model.state}: {model.reason}" for model in report.not_ready]
        raise ModelNotReady(f"{client.url} responds, but {'; '.join(reasons) or 'is not ready'}")
    typer.echo("ready")
