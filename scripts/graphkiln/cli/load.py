"""`graphkiln load` and `graphkiln unload`: change what a server serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln_backend.graph.errors import ModelNotFound, ServerError
from graphkiln_backend.graph.text import did_you_mean

if TYPE_CHECKING:
    from graphkiln_client import Client

Model = Annotated[str, typer.Argument(help="Model name.")]
# Loading lowers, compiles and proves the model first.
_LOAD_TIMEOUT_S = 600.0


@with_connection(timeout_s=_LOAD_TIMEOUT_S, admin=True)
def load(model: Model, connection: ConnectionOptions = DEFAULT_CONNECTION) -> None:
    """Load or reload a model of a server.

    In --model-control-mode=explicit, that is how new versions are served; in the
    other modes, what is served is loaded again. It needs the admin key, which is
    found by itself for a server of yours on this machine.
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
    """Unload a model of a server, which finishes its requests first.

    It needs the admin key, which is found by itself for a server of yours on
    this machine.
    """
    with connection.connect() as client:
        _check_known(client, model)  # Triton unloads what it never knew
        client.unload(model)
        typer.echo(f"{model}: unloading")


def _check_known(client: Client, model: str) -> None:
    names = sorted({each.name for each in client.models()})
    if model not in names:
        raise ModelNotFound(f"the server knows no model '{model}'", hint=did_you_mean(model, names))
