"""Options of a run: from the form in which users give them to a request that is checked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypedDict

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.lowering.settings import parse_override
from graphkiln_backend.repository.version_folders import is_version, version_number
from graphkiln_backend.scoring.destinations.parquet import DELTA_LOG, object_name
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.iceberg import PREFIX as ICEBERG
from graphkiln_backend.scoring.iceberg import TableName
from graphkiln_backend.scoring.messages import ID_DIGITS, ScoreRequest
from graphkiln_backend.scoring.plan import POSTGRES_SCHEMES, open_destination, open_source, pin_snapshot
from graphkiln_backend.scoring.sources.places import PathPattern, is_pattern, split_pattern
from graphkiln_backend.server.run_folder import installed_backend_names
from graphkiln_backend.storage.address import RemoteAddress

_VERSION = re.compile(r"(?P<model>.*[^:/]):(?P<version>[^:/]*)", re.S)
_ADDRESS = re.compile(rf"(?i:[a-z][a-z0-9+.-]*://)|{ICEBERG}")  # anything else is a path
_CONVERTED = ("settings", "outputs", "keep_columns", "cache")
# Files of a destination: results, notes, temporary files.
_RESULT_FILES = re.compile(rf"[_.].*|[0-9a-f]{{{ID_DIGITS}}}\.parquet")
_SHOWN = 3


class ScoreOptions(TypedDict, total=False):
    """Options of a run besides its source, model and destination; the flags of the command have the same names.

    Attributes:
        settings: Settings that override the model's configuration: `{"precision": "bf16"}` or `["precision=bf16"]`.
        address: Address of a Ray cluster; empty for this machine alone.
        workers: Maximum number of workers; 0 for as many as the cluster has room for.
        cores_per_worker: 0 for all cores of a node, or an equal share for each GPU.
        top_k: Classes per row.
        scores: Write the scores of all classes instead.
        outputs: Names of outputs to write unchanged instead; or one name.
        softmax: Turn scores into probabilities.
        keep_columns: Input columns to copy to the output: `["a", "b"]` or `"a,b"`.
        image_column: Column with the image or its path.
        id_column: Column with the row id.
        query: Table or SELECT of a Postgres source.
        rows_per_unit: Approximate number of rows that are committed together.
        cache: Folder of the artifact cache on each node; None for a temporary one.
        format: `parquet` or `delta`; empty for the default of the destination.
        ledger: Postgres database that records commits for a store without conditional writes.
        replace: Remove results whose input has changed.
    """

    settings: Mapping[str, str] | Sequence[str] | str
    address: str
    workers: int
    cores_per_worker: int
    top_k: int
    scores: bool
    outputs: Sequence[str] | str
    softmax: bool
    keep_columns: Sequence[str] | str
    image_column: str
    id_column: str
    query: str
    rows_per_unit: int
    cache: Path | str | None
    format: str
    ledger: str
    replace: bool


def build_request(source: str | Path, model: str | Path, out: str | Path, options: ScoreOptions) -> ScoreRequest:
    """Build a request that has the same meaning on every node.

    Args:
        source: Path or address, as the user wrote it.
        model: `STORE/NAME`, `STORE/NAME:VERSION` or `STORE/NAME/VERSION`; local or in a remote store.
        out: Path or address, as the user wrote it.
        options: The options.

    Raises:
        GraphkilnError: Options contradict each other, or a setting or version is invalid.
    """
    folder, version = parse_model(str(model))
    settings, columns = options.get("settings", ()), options.get("keep_columns", ())
    if isinstance(settings, Mapping):
        settings = [f"{key}={value}" for key, value in settings.items()]
    if isinstance(columns, str):
        columns = [name.strip() for name in columns.split(",")]
    cache = options.get("cache")
    request = ScoreRequest(
        source=absolute(str(source)),
        model=folder,
        version=version,
        destination=absolute(str(out)),
        overrides=tuple(map(parse_override, _as_list(settings))),
        backends=installed_backend_names(),
        outputs=tuple(_as_list(options.get("outputs", ()))),
        keep_columns=tuple(dict.fromkeys(filter(None, columns))),
        cache=Path(absolute(str(cache))) if cache else None,
        **{name: value for name, value in options.items() if name not in _CONVERTED},  # type: ignore[arg-type]
    )
    _check_options(request, has_top_k="top_k" in options)
    return request


def _as_list(values: Sequence[str] | str) -> Iterable[str]:
    return [values] if isinstance(values, str) else values


def absolute(text: str) -> str:
    """Make a path or `file:///` address absolute; return other addresses unchanged."""
    text = text.removeprefix("file://") if text.startswith("file:///") else text
    return text if _ADDRESS.match(text) else os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  keeps *


def parse_model(text: str) -> tuple[str, int | None]:
    """Split the argument `--model` into the model's folder and the version number, if there is one.

    Raises:
        RepositoryError: The part after the colon is not a version number.
    """
    if found := _VERSION.fullmatch(text):
        number = version_number(found["version"])
        if number is None:
            raise RepositoryError(
                f"'{found['version'][:40]}' is not a version number", hint="--model STORE/NAME:VERSION, such as :1"
            )
        return absolute(found["model"]), number
    above, slash, name = text.rstrip("/").rpartition("/")
    if slash and is_version(name):
        return absolute(above), int(name)
    return absolute(text.rstrip("/") or text), None


def _check_options(request: ScoreRequest, *, has_top_k: bool) -> None:
    forms = {"--top-k": has_top_k, "--scores": request.scores, "--output": bool(request.outputs)}
    given = [name for name, is_given in forms.items() if is_given]
    if len(given) > 1:
        raise ScoringError(f"{' and '.join(given)} contradict each other", hint="use only one of them")
    for name, value in {"--top-k": request.top_k, "--rows-per-unit": request.rows_per_unit}.items():
        if value < 1:
            raise ScoringError(f"{name} {value}: expected at least 1")
    for name, value in {"--workers": request.workers, "--cores-per-worker": request.cores_per_worker}.items():
        if value < 0:
            raise ScoringError(f"{name} {value}: expected at least 1", hint="leave it out to use what fits")


def check_places(request: ScoreRequest) -> None:
    """Check that source and destination do not overlap, and that the destination has no foreign files.

    Raises:
        ScoringError: They overlap, or it has.
    """
    if request.source.startswith(POSTGRES_SCHEMES):  # one database may contain both, in different tables
        return
    (source_service, source), (service, destination) = _located(request.source), _located(request.destination)
    if source_service == service:
        _check_apart(source, destination, request)
    if not _ADDRESS.match(request.destination):
        try:
            _check_foreign(Path(request.destination))
        except OSError as error:
            raise ScoringError(f"cannot list the destination {request.destination}: {error.strerror}") from error


def destination_exists(request: ScoreRequest) -> bool:
    """True if the destination may hold results or notes of earlier runs."""
    if request.destination.startswith(ICEBERG):
        return open_destination(request).exists
    return bool(_ADDRESS.match(request.destination)) or Path(request.destination).exists()


def with_pinned_snapshot(request: ScoreRequest) -> ScoreRequest:
    """Pin the snapshot of an Iceberg source, before anything is written.

    Raises:
        ScoringError: There is no such table or snapshot.
    """
    if not request.source.startswith(ICEBERG):
        return request
    return pin_snapshot(request, open_destination(request).notes if destination_exists(request) else None)


def check_source(request: ScoreRequest) -> None:
    """Check that the source can be read and is not empty, reading no more than its first range.

    Raises:
        ScoringError: It cannot be read, is empty, or lacks a column of the request.
    """
    if next(open_source(request).ranges(request.rows_per_unit), None) is None:
        raise ScoringError(
            f"there are no images in {request.source}",
            hint="use a folder or pattern of images, a .txt listing, .parquet, .tar, or a postgresql:// query",
        )


def _check_apart(source: str, destination: str, request: ScoreRequest) -> None:
    if source == destination:
        raise ScoringError(f"{request.source} is both source and destination", hint="use another --out")
    if destination.startswith(f"{source}/"):
        raise ScoringError(
            f"the destination {request.destination} is inside the source, and would be read as input",
            hint=f"use an --out beside it, such as {request.source.rstrip('/')}-scored",
        )
    if source.startswith(f"{destination}/"):
        raise ScoringError(f"the source {request.source} is inside the destination", hint="use an --out beside it")
    if is_pattern(source) and not Path(source).exists() and _matches_results(source, destination):
        raise ScoringError(
            f"the pattern {request.source} matches files in {request.destination}: the next run would read its results",
            hint="use an --out elsewhere",
        )


def _matches_results(pattern: str, destination: str) -> bool:
    folder, below = split_pattern(pattern)
    result = f"{destination}/{object_name('0' * ID_DIGITS)}"
    above = f"{folder.rstrip('/')}/"
    return result.startswith(above) and PathPattern(below).matches(result.removeprefix(above))


def _check_foreign(folder: Path) -> None:
    if folder.is_file():
        raise ScoringError(f"the destination {folder} is a file", hint="use a folder; it is created if it is missing")
    if not folder.is_dir() or (folder / DELTA_LOG).is_dir():  # the log of a Delta table lists its files
        return
    foreign = (path.name for path in sorted(folder.iterdir()) if not _RESULT_FILES.fullmatch(path.name))
    if names := list(islice(foreign, _SHOWN + 1)):
        shown = ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")
        raise ScoringError(
            f"the destination {folder} contains files of something else: {shown}",
            hint="use an empty or new folder, or the --out of an earlier run",
        )


def _located(text: str) -> tuple[str, str]:
    """Split a path or address into its service and the path there, with links resolved."""
    if text.startswith(ICEBERG):
        return TableName.parse(text).text, ""
    if not _ADDRESS.match(text):
        return "", os.path.realpath(text)  # pathlib fails for a loop of links
    try:
        address = RemoteAddress.parse(text)
    except RepositoryError:  # a database, or invalid and refused when it is opened
        address = None
    if address is None:
        return text.rstrip("/"), ""
    return f"{address.scheme}://{address.options.get('endpoint_url', '').lower()}", address.root
