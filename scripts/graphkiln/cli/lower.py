"""`graphkiln lower`: fill the artifact cache ahead of time, so that the server's start builds nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import typer

from graphkiln.cli.deployed import Cache, ModelPath, Set, read_deployment

if TYPE_CHECKING:
    from graphkiln.lowering.deployment import Deployment
    from graphkiln.lowering.lower import Lowered


_NO_LIMIT = "1024T"
"""Only the server, which knows the limit, removes what others have put there."""


def lower(path: ModelPath, set_: Set = None, cache: Cache = "") -> None:
    """Lower a model as the server will, prove it, and keep what was built in the cache."""
    deployment = read_deployment(path, set_)
    begun = time.monotonic()
    with lower_deployment(deployment, cache) as lowered:
        seconds = time.monotonic() - begun
        for line in (*lowered.fallbacks, *lowered.notes):
            typer.echo(f"graphkiln: {line}", err=True)
        typer.echo(f"{lowered.step}: {lowered.placement}")
        if lowered.self_test:
            typer.echo(lowered.self_test.verdict)
        typer.echo(f"ready in {seconds:.1f} s")


@contextmanager
def lower_deployment(deployment: Deployment, cache: str) -> Iterator[Lowered]:
    """Lowers with the cache that the command line names; closes the session in the end.

    Raises:
        LoweringError: No step worked.
    """
    from graphkiln.cli.cache import cache_settings
    from graphkiln.lowering.cache import ArtifactCache

    settings = cache_settings(cache, _NO_LIMIT, say=_say)
    with TemporaryDirectory(prefix="graphkiln-cache-") as temporary:
        folder = settings.folder or Path(temporary)
        lasting = settings.folder is not None
        with ArtifactCache(folder, limit_bytes=settings.limit_bytes, lasting=lasting, report=_say) as artifacts:
            lowered = deployment.lower(artifacts, report=lambda _: None, building=_say)
            with lowered.session:
                yield lowered


def _say(line: str) -> None:
    typer.echo(f"graphkiln: {line}", err=True)
