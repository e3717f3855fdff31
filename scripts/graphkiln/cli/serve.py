"""`graphkiln serve`: model stores in, a supervised tritonserver out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.graph.errors import ServerSetupError

if TYPE_CHECKING:
    from graphkiln.server.flags import TritonFlags
    from graphkiln.server.probe import ModelState

_DEFAULT_STORE = Path("model_repository")


def serve(
    context: typer.Context,
    model_store: Annotated[
        list[Path] | None,
        typer.Option(
            help="Folder of models; may be given several times.",
            envvar="GRAPHKILN_MODEL_STORE",
            show_default="./model_repository",
        ),
    ] = None,
) -> None:
    """Serve model stores on NVIDIA Triton until SIGTERM or Ctrl-C.

    Every other flag goes to tritonserver untouched, for example --http-port=9000,
    --model-control-mode=poll or --log-verbose=1.
    """
    from graphkiln.server.flags import TritonFlags
    from graphkiln.server.installation import find_installation
    from graphkiln.server.supervisor import Supervisor

    installation = find_installation()
    flags = TritonFlags.parse(context.args, installation.flags)
    stores = _checked_stores([*(model_store or ()), *flags.stores] or [_DEFAULT_STORE])
    flags.check_ports()
    supervisor = Supervisor(
        installation,
        stores,
        flags,
        on_live=lambda states: _show(states, flags),
        say=lambda line: typer.echo(f"graphkiln: {line}", err=True),
    )
    code = supervisor.run()
    if code:
        typer.echo(f"graphkiln: tritonserver ended with code {code}; the cause stands above", err=True)
    raise typer.Exit(code)


def _checked_stores(stores: list[Path]) -> list[Path]:
    for store in stores:
        if not store.is_dir():
            raise ServerSetupError(
                f"model store '{store}' is {'not a folder' if store.exists() else 'missing'}",
                hint="name a folder of models: --model-store DIR",
            )
    return stores


def _show(states: list[ModelState], flags: TritonFlags) -> None:
    """One table of what is served, and where."""
    from rich.console import Console
    from rich.table import Table

    table = Table("model", "version", "engine", "precision", "ready")
    for state in states:
        status = state.status
        ready = f"in {status.load_ms:.0f} ms" if status else state.state.lower()
        failed = state.state != "READY"
        table.add_row(
            state.model,
            state.version,
            f"{status.engine} on {status.device}, {status.threads} threads" if status else "-",
            status.precision if status else "-",
            f"{state.state}: {state.reason}" if failed else ready,
        )
    console = Console()
    if states:
        console.print(table)
    else:
        console.print("no model is loaded")
    addresses = (f"{e.protocol} {e.local_address[0]}:{e.port}" for e in flags.endpoints())
    console.print("serving " + ", ".join(addresses), highlight=False)
