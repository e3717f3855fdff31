"""`graphkiln models`, `load`, `unload` and `health`: the models of a server and their states."""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json, print_table, say
from graphkiln.cli.options import AsJson
from graphkiln_backend.graph.errors import ClientError, ModelNotFound, ModelNotReady, ServerError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.triton.rollout_files import tried_model

if TYPE_CHECKING:
    from graphkiln_client import Client
    from graphkiln_client.published import Health, ServedModel

Model = Annotated[str, typer.Argument(help="Model name.")]
_LOAD_TIMEOUT_S = 600.0  # includes lowering, compiling and proving the model
_HEALTH_POLL_S = 0.05
_HEALTH_TIMEOUT_S = 5.0


@with_connection(timeout_s=None, admin=True)
def models(connection: ConnectionOptions = DEFAULT_CONNECTION, as_json: AsJson = False) -> None:
    """List the model versions of a server and their states.

    Exit code 1 if one of them is neither ready nor replaced by another version.
    """
    with connection.connect() as client:
        listed = client.models()
    # Triton remembers the candidates of ended rollouts.
    ended = {"UNLOADING", "UNLOADED"}
    served = [model for model in listed if not (tried_model(model.name) and model.state in ended)]
    serving = {model.name: model.version for model in sorted(served, key=_number) if model.ready}
    replaced = [model for model in served if model.state in ended and model.name in serving]
    if as_json:
        print_json([asdict(model) for model in served])
    else:
        rows = [
            (
                model.name,
                model.version or "-",
                model.state or "not loaded",
                f"replaced by version {serving[model.name]}" if model in replaced else model.reason,
            )
            for model in served
        ]
        print_table(("model", "version", "state", "reason"), rows, empty="the server has no models")
    raise typer.Exit(0 if all(model.ready or model in replaced for model in served) else 1)


def _number(model: ServedModel) -> int:
    return int(model.version or 0)


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


@with_connection(timeout_s=None, admin=True)
def health(
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    wait: Annotated[float, typer.Option(help="Seconds to wait for the server to become ready.", min=0)] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Check that a server and all its models are ready.

    Exit code 0 if they are, otherwise 1.
    """
    deadline, said = time.monotonic() + wait, ""
    with replace(connection, timeout=min(_HEALTH_TIMEOUT_S, wait or _HEALTH_TIMEOUT_S)).connect() as client:
        while True:
            is_last = time.monotonic() >= deadline
            try:
                report = client.health()
                if report.ready or is_last:
                    break
                reason = _not_ready(client, report)
            except ClientError as error:
                if is_last:
                    raise
                reason = error.message
            if reason != said:
                say(f"waiting: {reason}")
            said = reason
            time.sleep(_HEALTH_POLL_S)
    if as_json:
        print_json(asdict(report))
        raise typer.Exit(0 if report.ready else 1)
    if not report.ready:
        raise ModelNotReady(_not_ready(client, report))
    typer.echo("ready")


def _not_ready(client: Client, report: Health) -> str:
    reasons = [
        f"{model.name} {model.version} is {model.state}: {model.reason}".removesuffix(": ")
        for model in report.not_ready
    ]
    return f"{client.url} responds, but {'; '.join(reasons) or 'is not ready'}"
