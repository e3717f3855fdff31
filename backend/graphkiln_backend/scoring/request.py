"""The request of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.lowering.settings import Override

DEFAULT_ROWS_PER_UNIT = 1000
DEFAULT_TOP_K = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreRequest:
    """A run: source, model, destination, options. It is sent to each worker.

    Attributes:
        source: Text of the source, as `open_source` takes it; a path is absolute.
        model: The model's folder: an absolute path, or an address in a remote store, `s3://BUCKET/STORE/NAME`.
        version: Number of the version; None for the newest.
        destination: Text of the destination, as `open_destination` takes it; a path is absolute.
        overrides: Settings over the model's configuration, the first before the next.
        backends: Names of Triton backends that mean ours.
        top_k: Classes per row, where neither `scores` nor `outputs` is given.
        scores: Whether each row gets the scores of all classes instead.
        outputs: Names of the outputs that each row gets as they are, instead.
        softmax: Whether scores become probabilities.
        keep_columns: Columns of the input that are carried along.
        image_column: Column that holds the image, or its path; empty to find it.
        id_column: Column that names the row; empty for the path of its image, or its place in the input.
        query: Table or SELECT of a Postgres source.
        rows_per_unit: About how many rows are committed together.
        workers: How many; 0 for as many as the cluster has room for.
        cores_per_worker: Cores of each worker; 0 for all of a node, or an equal part for each GPU.
        address: Address of the Ray cluster; empty for this machine alone.
        cache: Folder of the artifact cache on each node; None for one that vanishes with the worker.
        format: `parquet` or `delta`; empty for what the destination's text says.
        ledger: Text of a Postgres database that remembers commits for a store that cannot refuse a second one; empty
            for none.
        replace: Whether results of an input that has changed since are removed.
    """

    source: str
    model: Path | str
    version: int | None = None
    destination: str
    overrides: tuple[Override, ...] = ()
    backends: frozenset[str] = frozenset()
    top_k: int = DEFAULT_TOP_K
    scores: bool = False
    outputs: tuple[str, ...] = ()
    softmax: bool = False
    keep_columns: tuple[str, ...] = ()
    image_column: str = ""
    id_column: str = ""
    query: str = ""
    rows_per_unit: int = DEFAULT_ROWS_PER_UNIT
    workers: int = 0
    cores_per_worker: int = 0
    address: str = ""
    cache: Path | None = None
    format: str = ""
    ledger: str = ""
    replace: bool = False

    def facts(self) -> Mapping[str, str]:
        """List the options that change an answer or what is written of it, beside the facts of the model."""
        answers = f"outputs {self.outputs}" if self.outputs else "scores" if self.scores else f"top {self.top_k}"
        return {
            "settings": repr([(each.key, each.value) for each in self.overrides]),
            "answers": f"{answers}, softmax" if self.softmax else answers,
            "columns": repr((self.image_column, self.id_column, self.keep_columns)),
        }
