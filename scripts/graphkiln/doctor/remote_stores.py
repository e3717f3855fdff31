"""Each remote store: can it be listed from here, with these credentials, and what would be copied?"""

from __future__ import annotations

from collections.abc import Iterator

from graphkiln.doctor.finding import Finding, Level, Request, format_size


def check_remote_stores(request: Request) -> Iterator[Finding]:
    """Lists every store; nothing is copied."""
    from graphkiln_backend.repository.remote_files import RemoteFiles, RemoteStoreError

    for address in request.remote:
        try:
            listing = RemoteFiles(address).list()
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
