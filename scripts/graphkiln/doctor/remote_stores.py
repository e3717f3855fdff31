"""Each remote store: can it be listed from here, with these credentials, and what would be copied?"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from graphkiln.doctor.finding import Finding, Level, Request, format_size
from graphkiln.doctor.models import examine_model
from graphkiln_backend.storage.address import RemoteAddress


def check_remote_stores(request: Request) -> Iterator[Finding]:
    """Lists every store; nothing is copied."""
    from graphkiln_backend.storage.address import RemoteStoreError
    from graphkiln_backend.storage.files import RemoteFiles

    for address in request.remote:
        try:
            listing = RemoteFiles(address).list()
            if is_one_model(listing):
                yield from _find_model(address)
                continue
        except RemoteStoreError as error:
            message = error.message.removeprefix(f"{address}: ")
            yield Finding(subject=str(address), level=Level.ERROR, message=message, hint=error.hint)
            continue
        models = sorted({path.partition("/")[0] for path in listing if "/" in path})
        size = sum(file.size for file in listing.values())
        yield Finding(
            subject=str(address),
            level=Level.OK if models else Level.WARNING,
            message=f"{len(models)} models, {len(listing)} files, {format_size(size)}"
            if models
            else "the model store holds no model",
            facts={"models": models, "files": len(listing), "size_bytes": size},
        )


def is_one_model(listing: Collection[str]) -> bool:
    """Whether a listing is that of a model or a version, rather than of a store.

    Args:
        listing: Paths below the address.
    """
    from graphkiln_backend.repository.version import CONFIG_FILE, GRAPH_FILE
    from graphkiln_backend.repository.version_folders import is_version

    folders = {path.partition("/")[0] for path in listing if "/" in path}
    own = {CONFIG_FILE, GRAPH_FILE} & set(listing)
    return bool(own) or (bool(folders) and all(map(is_version, folders)))


def _find_model(address: RemoteAddress) -> Iterator[Finding]:
    """One model, examined as one of this machine is; its newest version is fetched for that.

    Raises:
        RemoteStoreError: It cannot be fetched.
    """
    from graphkiln_backend.repository.remote_model import fetch_model
    from graphkiln_backend.repository.stores import model_at
    from graphkiln_backend.system.owned_folder import OwnedFolder

    with OwnedFolder(prefix="graphkiln-doctor-") as temporary:
        fetched = fetch_model(address, temporary.path)
        found, _ = examine_model(model_at(fetched) or fetched, compare_hashes=True)
    yield from found
    yield Finding(
        subject=str(address),
        level=Level.WARNING,
        message="a model, not a store of models: only its newest version was examined",
        hint=f"serve takes the store that holds it: {address.split()[0]}",
    )
