"""A model of a store as the server would lower it on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.graph.errors import RepositoryError

if TYPE_CHECKING:
    from graphkiln.lowering.deployment import Deployment

ModelPath = Annotated[Path, typer.Argument(help="STORE/NAME (its newest version), or STORE/NAME/VERSION.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting over its config.pbtxt, such as precision=bf16.", metavar="KEY=VALUE"),
]
Cache = Annotated[
    str,
    typer.Option(
        help="Folder for lowered graphs and compiled artifacts, or 'off'.",
        envvar="GRAPHKILN_CACHE",
        show_default="~/.cache/graphkiln",
    ),
]


def read_deployment(path: Path, settings: list[str] | None) -> Deployment:
    """Reads and plans a version as the server would.

    Args:
        path: A model's folder or a version folder.
        settings: `KEY=VALUE`s of `--set`.

    Raises:
        GraphkilnError: The version or its configuration is not usable, or nothing can run it as it is asked for.
    """
    from graphkiln.cli.verify import version_folder
    from graphkiln.engines.cores import usable_cores
    from graphkiln.engines.registry import probe
    from graphkiln.lowering.deployment import Deployment
    from graphkiln.lowering.plan import Machine
    from graphkiln.lowering.settings import parse_override
    from graphkiln.repository.config import BACKEND, DROP_IN_BACKEND, as_dictionary
    from graphkiln.repository.overlay import DEFAULT_INSTANCES, complete_config

    folder = version_folder(path).absolute()
    config = complete_config(folder.parent, frozenset({BACKEND, DROP_IN_BACKEND}))
    if not config.instance_group:
        config.instance_group.add(count=DEFAULT_INSTANCES.get(config.backend, 1))
    overrides = [parse_override(text) for text in settings or []]
    machine = Machine(device=_device(config), cores=usable_cores(), probe=probe)
    return Deployment.read(folder, as_dictionary(config), machine, overrides)


def _device(config: object) -> str:
    """Where Triton would put the first instance: on a GPU when it is told so, or when there is one and it is not."""
    from graphkiln.engines.device import gpus

    group = config.instance_group[0]  # type: ignore[attr-defined]
    kinds = dict(group.Kind.items())
    if group.kind == kinds["KIND_GPU"]:
        return f"gpu:{group.gpus[0] if group.gpus else 0}"
    if group.kind == kinds["KIND_AUTO"] and gpus():
        return f"gpu:{group.gpus[0] if group.gpus else 0}"
    if group.kind == kinds["KIND_MODEL"]:
        raise RepositoryError("instance_group of KIND_MODEL is not supported", hint="use KIND_CPU or KIND_GPU")
    return "cpu"
