"""`graphkiln load` and `graphkiln unload`: change what a server serves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import connect
from graphkiln.cli.options import AdminKeyFile, CaFile, ClientCert, ClientKey, Headers, Timeout, Url
from graphkiln_client.defaults import DEFAULT_TIMEOUT_S, DEFAULT_URL

if TYPE_CHECKING:
    from graphkiln_client import Client

Model = Annotated[str, typer.Argument(help="Model name.")]
_LOAD_TIMEOUT_S = 600.0
"""Loading lowers, compiles and proves the model first."""


def load(
    model: Model,
    url: Url = DEFAULT_URL,
    timeout: Timeout = _LOAD_TIMEOUT_S,
    header: Headers = None,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    admin_key_file: AdminKeyFile = None,
) -> None:
    """Load or reload a model of a server.

    The server must run with --model-control-mode=explicit. It needs the admin key, which is found by
    itself for a server of yours on this machine.
    """
    with connect(
        url,
        header,
        ca_file,
        timeout,
        client_cert=client_cert,
        client_key=client_key,
        admin_key_file=admin_key_file,
    ) as client:
        client.load(model)
        typer.echo(f"{model}: {_states(client, model)}")


def unload(
    model: Model,
    url: Url = DEFAULT_URL,
    timeout: Timeout = DEFAULT_TIMEOUT_S,
    header: Headers = None,
    ca_file: CaFile = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    admin_key_file: AdminKeyFile = None,
) -> None:
    """Unload a model of a server, which finishes its requests first.

    The server must run with --model-control-mode=explicit. It needs the admin key, which is found by
    itself for a server of yours on this machine.
    """
    with connect(
        url,
        header,
        ca_file,
        timeout,
        client_cert=client_cert,
        client_key=client_key,
        admin_key_file=admin_key_file,
    ) as client:
        client.unload(model)
        typer.echo(f"{model}: unloading")


def _states(client: Client, model: str) -> str:
    versions = [each for each in client.models() if each.name == model]
    return ", ".join(f"version {each.version} {each.state.lower()}" for each in versions) or "loaded"
