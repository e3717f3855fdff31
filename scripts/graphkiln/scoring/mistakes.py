"""Checks of a request before Ray is started and before anything is written."""

from __future__ import annotations

import os
import re
from itertools import islice
from pathlib import Path

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.scoring.destinations.parquet import DELTA_LOG, object_name
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.opening import POSTGRES_SCHEMES, open_source
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.sources.places import PathPattern, is_pattern, split_pattern
from graphkiln_backend.scoring.units import ID_DIGITS
from graphkiln_backend.storage.address import RemoteAddress

# Results and notes of a destination, and what is being written.
_OURS = re.compile(rf"[_.].*|[0-9a-f]{{{ID_DIGITS}}}\.parquet")
_SHOWN = 3


def check_places(request: ScoreRequest) -> None:
    """Check that source and destination do not lie in each other, and that the destination holds nothing else.

    Raises:
        ScoringError: They do, or it does.
    """
    if request.source.startswith(POSTGRES_SCHEMES):  # one database may hold both, each in its own tables
        return
    (where, source), (there, destination) = _located(request.source), _located(request.destination)
    if where == there:
        _check_apart(source, destination, request)
    if "://" not in request.destination:
        try:
            _check_foreign(Path(request.destination))
        except OSError as error:
            raise ScoringError(f"cannot look at the destination {request.destination}: {error.strerror}") from error


def check_source(request: ScoreRequest) -> None:
    """Check that the source can be read and hold a row; read no further than its first range.

    Raises:
        ScoringError: It cannot, holds none, or has no column of a name that is given.
    """
    if next(open_source(request).ranges(request.rows_per_unit), None) is None:
        raise ScoringError(
            f"there are no images in {request.source}",
            hint="a folder or pattern of images, a .txt listing, .parquet, .tar, or a postgresql:// query",
        )


def _check_apart(source: str, destination: str, request: ScoreRequest) -> None:
    """Check two paths of one file system or service."""
    if source == destination:
        raise ScoringError(f"{request.source} is both source and destination", hint="name another --out")
    if destination.startswith(f"{source}/"):
        raise ScoringError(
            f"the destination {request.destination} is inside the source, and would be read as input",
            hint=f"name an --out beside it, such as {request.source.rstrip('/')}-scored",
        )
    if source.startswith(f"{destination}/"):
        raise ScoringError(f"the source {request.source} is inside the destination", hint="name an --out beside it")
    if is_pattern(source) and not Path(source).exists() and _means_results(source, destination):
        raise ScoringError(
            f"{request.source} means the files in {request.destination}, too: the next run would read them as input",
            hint="name an --out elsewhere",
        )


def _means_results(pattern: str, destination: str) -> bool:
    """True if files that a run writes match the pattern that is its source."""
    folder, below = split_pattern(pattern)
    result = f"{destination}/{object_name('0' * ID_DIGITS)}"
    above = f"{folder.rstrip('/')}/"
    return result.startswith(above) and PathPattern(below).matches(result.removeprefix(above))


def _check_foreign(folder: Path) -> None:
    if folder.is_file():
        raise ScoringError(
            f"the destination {folder} is a file", hint="name a folder, which is made where it is missing"
        )
    if not folder.is_dir() or (folder / DELTA_LOG).is_dir():  # whose files Delta knows by its log
        return
    foreign = islice((path.name for path in sorted(folder.iterdir()) if not _OURS.fullmatch(path.name)), _SHOWN + 1)
    if names := list(foreign):
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise ScoringError(
            f"the destination {folder} holds what graphkiln score did not write: {shown}",
            hint="name an empty folder, a new one, or the --out of an earlier run",
        )


def _located(text: str) -> tuple[str, str]:
    """Split a text into its service and the path there. Links are followed, last slashes dropped.

    One server may have several names all the same; what a run finds there then tells it.
    """
    if "://" not in text:
        return "", os.path.realpath(text)  # of a loop of links, for which pathlib fails, it is what cannot be resolved
    try:
        address = RemoteAddress.parse(text)
    except RepositoryError:  # of a database, or refused elsewhere
        address = None
    if address is None:
        return text.rstrip("/"), ""
    return f"{address.scheme}://{address.options.get('endpoint_url', '').lower()}", address.root
