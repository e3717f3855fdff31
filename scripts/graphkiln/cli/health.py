"""`graphkiln health`: is every model ready?"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.options import DEFAULT_URL, Url
from graphkiln.graph.errors import ClientError, ModelNotReady

if TYPE_CHECKING:
    from graphkiln.client import Client

_POLL_S = 0.05


def health(
    url: Url = DEFAULT_URL,
    wait: Annotated[float, typer.Option(help="Seconds to wait until it is ready.", min=0)] = 0.0,
) -> None:
    """Tell whether a server is there and every model is ready: exit code 0, else 1."""
    from graphkiln.client import Client

    deadline = time.monotonic() + wait
    with Client(url, timeout_s=5) as client:
        while (trouble := _trouble(client)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    if trouble:
        raise trouble
    typer.echo("ready")


def _trouble(client: Client) -> ClientError | None:
    try:
        if client.ready():
            return None
        return ModelNotReady(f"{client.url} answers, but not every model is ready")
    except ClientError as error:
        return error
