"""A model of a store as the server would lower it on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.errors import RepositoryError

if TYPE_CHECKING:
    from graphkiln_backend.cache.store import ArtifactCache
    from graphkiln_backend.lowering.deployment import Deployment

ModelPath = Annotated[Path, typer.Argument(help="STORE/NAME (its newest version), or STORE/NAME/VERSION.")]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", help="Setting over its config.pbtxt, such as precision=bf16.", metavar="KEY=VALUE"),
]


@contextmanager
def opened_cache(cache: str) -> Iterator[ArtifactCache]:
    """The cache that the command line names, which only the server keeps small."""
    from graphkiln.cli.cache import cache_settings

    settings = cache_settings(cache, sys.maxsize)
    with TemporaryDirectory(prefix="graphkiln-cache-") as vanishing, settings.open(Path(vanishing)) as artifacts:
        yield artifacts


def read_deployment(path: Path, settings: list[str] | None, artifacts: ArtifactCache) -> Deployment:
    """Reads and plans a version as the server would.

    Args:
        path: A model's folder or a version folder.
        settings: `KEY=VALUE`s of `--set`.
        artifacts: Graphs that OneFlow saved are converted into it.

    Raises:
        GraphkilnError: The version or its configuration is not usable, or nothing can run it as it is asked for.
    """
    from graphkiln.cli.verify import version_folder
    from graphkiln_backend.engines.cores import usable_cores
    from graphkiln_backend.engines.registry import probe
    from graphkiln_backend.lowering.adoption import adopted
    from graphkiln_backend.lowering.deployment import Deployment
    from graphkiln_backend.lowering.plan import Resources
    from graphkiln_backend.lowering.settings import parse_override
    from graphkiln_backend.repository.config import as_dictionary
    from graphkiln_backend.repository.overlay import complete_config

    folder = version_folder(path).absolute()
    config = complete_config(folder.parent, _names_of_ours(), lambda version: adopted(version, artifacts))
    graph = adopted(folder, artifacts)
    _complete_instances(config)
    overrides = [parse_override(text) for text in settings or []]
    machine = Resources(device=_device(config), cores=usable_cores(), probe=probe)
    return Deployment.read(graph, as_dictionary(config), machine, overrides)


def _names_of_ours() -> frozenset[str]:
    """The names under which `serve` installs our backend here; all of them where no Triton is installed to ask."""
    from graphkiln_backend.graph.errors import ServerSetupError
    from graphkiln_backend.server.installation import find_installation
    from graphkiln_backend.server.run_folder import NAMES, names_of_ours

    try:
        return names_of_ours([find_installation().backends], replace_onnxruntime=False)
    except ServerSetupError:
        return NAMES


def _complete_instances(config: Any) -> None:
    """Gives every group the number of instances that Triton gives it.

    Source: Triton core, `SetDefaultInstanceCount`.
    """
    from graphkiln_backend.repository.overlay import DEFAULT_INSTANCES

    if not config.instance_group:
        config.instance_group.add()
    for group in config.instance_group:
        group.count = group.count or (1 if _on_gpu(group) else DEFAULT_INSTANCES.get(config.backend, 1))


def _device(config: Any) -> Device:
    """Where Triton would put the first instance."""
    group = config.instance_group[0]
    return Device.gpu(group.gpus[0] if group.gpus else 0) if _on_gpu(group) else CPU


def _on_gpu(group: Any) -> bool:
    """Whether Triton puts a group on a GPU: when it is told so, or when it is not and there is one.

    Raises:
        RepositoryError: It would ask the model, which has no say.
    """
    from graphkiln_backend.engines.hardware import gpus

    kinds = dict(group.Kind.items())
    if group.kind == kinds["KIND_MODEL"]:
        raise RepositoryError("instance_group of KIND_MODEL is not supported", hint="use KIND_CPU or KIND_GPU")
    return group.kind == kinds["KIND_GPU"] or (group.kind == kinds["KIND_AUTO"] and bool(gpus()))
