"""The model of a run on this node: where it lies, or fetched from a remote store."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.remote_model import fetch_model
from graphkiln_backend.repository.version import newest_version
from graphkiln_backend.repository.version_folders import version_folders, version_number
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFiles


def with_version(request: ScoreRequest) -> ScoreRequest:
    """The same request with the number of its version; a remote store is only listed.

    Raises:
        RepositoryError: There is no such model, or the store cannot be read.
    """
    if request.version:
        return request
    address = RemoteAddress.parse(str(request.model))
    if address is None:
        return replace(request, version=int(newest_version(Path(request.model)).name))
    numbers = (version_number(path.partition("/")[0]) for path in RemoteFiles(address).list() if "/" in path)
    newest = max((number for number in numbers if number is not None), default=None)
    if newest is None:
        raise RemoteStoreError(f"there is no model at {address}", hint="STORE/NAME, or STORE/NAME:VERSION")
    return replace(request, version=newest)


def with_local_model(request: ScoreRequest, folder: Path) -> ScoreRequest:
    """The same request with a model folder of this node, and the number of its version.

    The driver does this first: what it finds to be the newest version is the one that every worker takes, also when
    another one appears meanwhile.

    Args:
        request: The run.
        folder: Where a model of a remote store is put; it must live as long as the model is used.

    Raises:
        RepositoryError: There is no such model or version, or the store cannot be read.
    """
    address = RemoteAddress.parse(str(request.model))
    if address is None:
        return _with_version_of(request, Path(request.model).absolute())
    fetched = fetch_model(_version_address(address, request.version), folder)
    version = fetched if request.version else newest_version(fetched)
    return replace(request, model=version.parent, version=int(version.name))


def _with_version_of(request: ScoreRequest, model: Path) -> ScoreRequest:
    newest = int(newest_version(model).name)  # or says what is wrong with the model
    if request.version and not (model / str(request.version)).is_dir():
        there = ", ".join(map(str, version_folders(model.iterdir())))
        raise RepositoryError(f"model '{model.name}' has no version {request.version}", hint=f"it has {there}")
    return replace(request, model=model, version=request.version or newest)


def _version_address(model: RemoteAddress, version: int | None) -> RemoteAddress:
    if version is None:
        return model
    return replace(model, root=f"{model.root}/{version}", text=f"{model}/{version}")
