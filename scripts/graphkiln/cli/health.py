"""`graphkiln health`: is every model ready?"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json
from graphkiln_backend.graph.errors import ClientError, ModelNotReady

if TYPE_CHECKING:
    from graphkiln_client import Client, Health

_POLL_S = 0.05
_TIMEOUT_S = 5.0


@with_connection(timeout_s=None, admin=True)
def health(
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it is ready.", min=0)] = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check that a server runs and every model is ready.

    Exit code 0 when both is so, else 1.
    """
    deadline = time.monotonic() + wait
    with replace(connection, timeout=min(_TIMEOUT_S, wait or _TIMEOUT_S)).connect() as client:
        while not (state := _check(client))[0] and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    ready, report = state
    if isinstance(report, ClientError):
        raise report
    if as_json:
        print_json(asdict(report))
        raise typer.Exit(0 if ready else 1)
    if not ready:
        raise ModelNotReady(f"{client.url} answers, but {_reasons(report)}")
    typer.echo("ready")


def _check(client: Client) -> tuple[bool, Health | ClientError]:
    """Return readiness, with the server's report or the reason why there is none."""
    try:
        report = client.health()
    except ClientError as error:
        return False, error
    return report.ready, report


def _reasons(report: Health) -> str:
    reasons = [f"{model.name} {model.version} is {model.state}: {model.reason}" for model in report.not_ready]
    return "; ".join(reasons) or "is not ready"
