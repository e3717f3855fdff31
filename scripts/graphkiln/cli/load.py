"""`graphkiln load` and `graphkiln unload`: load and unload models of a server."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln_backend.graph.errors import ModelNotFound, ServerError
from graphkiln_backend.graph.text import did_you_mean

if TYPE_CHECKING:
    from graphkiln_client import Client

Model = Annotated[str, typer.Argument(help="Model name.")]
_LOAD_TIMEOUT_S = 600.0  # includes lowering, compiling and proving the model


@with_connection(timeout_s=_LOAD_TIMEOUT_S, admin=True)
def load(model: Model, connection: ConnectionOptions = DEFAULT_CONNECTION) -> None:
    """Load or reload a model of a server.

    With --model-control-mode=explicit this serves new versions; in the other modes
    it reloads the served ones. Requires the admin key, which is found
    automatically for your own servers on this machine.
    """
    with connection.connect() as client:
        try:
            client.load(model)
        except ServerError:
            _check_known(client, model)
            raise
        states = [f"version {each.version} {each.state.lower()}" for each in client.models() if each.name == model]
        typer.echo(f"{model}: {', '.join(states) or 'loaded'}")


@with_connection(admin=True)
def unload(model: Model, connection: ConnectionOptions = DEFAULT_CONNECTION) -> None:
    """Unload a model of a server after its requests in flight.

    Requires the admin key, which is found automatically for your own servers on
    this machine.
    """
    with connection.connect() as client:
        _check_known(client, model)  # Triton reports success for unknown models
        client.unload(model)
        typer.echo(f"{model}: unloading")


def _check_known(client: Client, model: str) -> None:
    names = sorted({each.name for each in client.models()})
    if model not in names:
        raise ModelNotFound(f"the server has no model '{model}'", hint=did_you_mean(model, names))
