"""The options of a run as people give them, and the request that they make."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.lowering.settings import parse_override
from graphkiln_backend.repository.version_folders import is_version, version_number
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.server.run_folder import installed_backend_names

_VERSION = re.compile(r"(?P<model>.*[^:/]):(?P<version>[^:/]*)", re.S)
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*://", re.I)
_READ = ("settings", "outputs", "keep_columns", "cache")  # options that may be given in several forms


class ScoreOptions(TypedDict, total=False):
    """Options of a run beside its source, model and destination; the command's flags have the same names.

    Attributes:
        settings: Settings over the model's configuration: `{"precision": "bf16"}`, or `["precision=bf16"]`.
        address: Address of the Ray cluster; empty for this machine alone.
        workers: How many; 0 for as many as there is room for.
        cores_per_worker: Cores of each; 0 for all of a node, or an equal part for each GPU.
        top_k: Classes per row.
        scores: Whether each row gets the scores of all classes instead.
        outputs: Names of the outputs that each row gets as they are, instead; or one name.
        softmax: Whether scores become probabilities.
        keep_columns: Columns of the input that are carried along: `["a", "b"]`, or `"a,b"`.
        image_column: Column that holds the image, or its path.
        id_column: Column that names the row.
        query: Table or SELECT of a Postgres source.
        rows_per_unit: About how many rows are committed together.
        cache: Folder of the artifact cache on each node; None for one that vanishes with the worker.
        format: `parquet` or `delta`; empty for what the destination says.
        ledger: Postgres database that remembers commits, for a store that cannot refuse a second one.
        replace: Whether results of an input that has changed since are removed.
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
    """Build a request that means the same on every node.

    Args:
        source: As the user wrote it.
        model: `STORE/NAME`, `STORE/NAME:VERSION` or `STORE/NAME/VERSION`; also in a remote store.
        out: As the user wrote it.
        options: The rest.

    Raises:
        GraphkilnError: Options contradict each other, or a setting or version is malformed.
    """
    place, version = parse_model(str(model))
    plain = {name: value for name, value in options.items() if name not in _READ}
    request = ScoreRequest(
        source=absolute(str(source)),
        model=place,
        version=version,
        destination=absolute(str(out)),
        overrides=tuple(map(parse_override, _setting_texts(options.get("settings", ())))),
        backends=installed_backend_names(),
        outputs=tuple(_as_list(options.get("outputs", ()))),
        keep_columns=tuple(_column_names(options.get("keep_columns", ()))),
        cache=_cache_folder(options.get("cache")),
        **plain,  # type: ignore[arg-type]  # of ScoreOptions, whose types are the request's
    )
    _check(request, asked_for_classes="top_k" in options)
    return request


def absolute(text: str) -> str:
    """A path that means the same in another working directory, also of `file:///PATH`; other addresses stay."""
    text = text.removeprefix("file://") if text.startswith("file:///") else text
    return text if _SCHEME.match(text) else os.path.abspath(os.path.expanduser(text))  # noqa: PTH100, PTH111  keeps *


def parse_model(text: str) -> tuple[str, int | None]:
    """Read the text of a model: its folder, and the number of the version where one is named.

    Raises:
        RepositoryError: What follows the colon is no version.
    """
    if found := _VERSION.fullmatch(text):
        number = version_number(found["version"])
        if number is None:
            raise RepositoryError(
                f"'{found['version'][:40]}' is no version of a model", hint="--model STORE/NAME:VERSION, such as :1"
            )
        return absolute(found["model"]), number
    above, slash, name = text.rstrip("/").rpartition("/")
    if slash and is_version(name):
        return absolute(above), int(name)
    return absolute(text.rstrip("/") or text), None


def _setting_texts(settings: Mapping[str, str] | Sequence[str] | str) -> Sequence[str]:
    if isinstance(settings, Mapping):
        return [f"{key}={value}" for key, value in settings.items()]
    return _as_list(settings)


def _as_list(values: Sequence[str] | str) -> Sequence[str]:
    """One text is no list of its letters."""
    return [values] if isinstance(values, str) else values


def _column_names(columns: Sequence[str] | str) -> Iterable[str]:
    """Split names at commas; each name once."""
    names = [name.strip() for name in columns.split(",")] if isinstance(columns, str) else columns
    return dict.fromkeys(filter(None, names))


def _cache_folder(folder: Path | str | None) -> Path | None:
    return Path(absolute(str(folder))) if folder else None


def _check(request: ScoreRequest, *, asked_for_classes: bool) -> None:
    forms = {"--top-k": asked_for_classes, "--scores": request.scores, "--output": bool(request.outputs)}
    given = [name for name, is_given in forms.items() if is_given]
    if len(given) > 1:
        raise ScoringError(f"{' and '.join(given)} both say what is written of a row", hint="give one of them")
    least = {"--top-k": request.top_k, "--rows-per-unit": request.rows_per_unit}
    for name, value in least.items():
        if value < 1:
            raise ScoringError(f"{name} {value}: expected at least 1")
    for name, value in {"--workers": request.workers, "--cores-per-worker": request.cores_per_worker}.items():
        if value < 0:
            raise ScoringError(f"{name} {value}: expected at least 1", hint="leave it out for what fits")
