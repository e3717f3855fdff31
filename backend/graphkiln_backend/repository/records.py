"""Records: Parquet files of requests that a server answered, with the answers.

    FOLDER/MODEL/20261128T181530Z-1a2b3c4d.parquet

`triton.recording` writes them; `graphkiln replay`, `convert --samples` and `tune --samples` read them. A file is named
by the time of its first row and by chance. While it is written, its name is hidden and its writer holds a lock on it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType, split_text
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.modules import LazyModule, require_packages
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.system.owned_folder import locked_if_dead

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq
else:
    pa = LazyModule("pyarrow")
    pq = LazyModule("pyarrow.parquet")

SUFFIX = ".parquet"
PARTIAL = ".partial"
_TIME = "%Y%m%dT%H%M%SZ"
_FILE = re.compile(rf"(\d{{8}}T\d{{6}}Z)-[0-9a-f]{{8}}{re.escape(SUFFIX)}")
_ROWS_AT_A_TIME = 16

Arrays = Mapping[str, AnyArray]


def schema() -> pa.Schema:
    """Return the columns of a record.

    A tensor is `data`, little-endian and in C order (text as in requests: each element with its length before it), or
    the `sha256` of that.
    """
    tensors = pa.list_(
        pa.struct(
            [
                ("name", pa.string()),
                ("dtype", pa.string()),
                ("shape", pa.list_(pa.int64())),
                ("data", pa.binary()),
                ("sha256", pa.string()),
            ]
        )
    )
    return pa.schema(
        [
            ("request_id", pa.string()),
            ("time", pa.timestamp("ns", "UTC")),
            ("model", pa.string()),
            ("version", pa.int64()),
            ("graph_sha256", pa.string()),
            ("engine", pa.string()),
            ("precision", pa.string()),
            ("latency_us", pa.int64()),
            ("inputs", tensors),
            ("outputs", tensors),
        ]
    )


def file_name(time_s: float, chance: str) -> str:
    """Name a file by the time of its first row, in seconds since 1970, and by 8 hexadecimal digits."""
    return f"{datetime.fromtimestamp(time_s, UTC).strftime(_TIME)}-{chance}{SUFFIX}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRequest:
    """A request that was answered.

    Attributes:
        time_ns: When it was answered, in nanoseconds since 1970.
        graph_sha256: SHA-256 of the graph that answered.
        inputs: In the shapes of the graph; None if only digests were recorded.
        outputs: The requested outputs.
    """

    request_id: str
    time_ns: int
    model: str
    version: int
    graph_sha256: str
    engine: str
    precision: str
    latency_us: int
    inputs: Arrays | None
    outputs: Arrays

    @property
    def time(self) -> str:
        """Time in UTC, ISO 8601."""
        return datetime.fromtimestamp(self.time_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def _read_tensors(tensors: Sequence[Mapping[str, Any]]) -> dict[str, AnyArray] | None:
    if any(tensor["data"] is None for tensor in tensors):
        return None
    return {tensor["name"]: _read_tensor(tensor) for tensor in tensors}


def _read_tensor(tensor: Mapping[str, Any]) -> AnyArray:
    dtype = DType(tensor["dtype"])
    if dtype is not DType.BYTES:
        return np.frombuffer(bytearray(tensor["data"]), dtype.numpy).reshape(tensor["shape"])
    words = split_text(tensor["data"])
    array = np.empty(len(words), np.object_)
    array[:] = words
    return array.reshape(tensor["shape"])


def is_record(path: Path) -> bool:
    """Return true for a Parquet file, or a folder with files of `serve --record`, also one level below."""
    if path.is_file():
        return path.suffix == SUFFIX
    return any(_FILE.fullmatch(file.name) for place in ("*", "*/*") for file in path.glob(f"{place}{SUFFIX}"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """The recorded requests of one model.

    Attributes:
        path: What the user named.
        files: Its files, oldest first.
    """

    path: Path
    files: tuple[Path, ...] = field(default=())

    @classmethod
    def find(cls, path: Path, model: str = "") -> Record:
        """Find the requests of a model.

        Args:
            path: The folder of `serve --record`, the folder of a model in it, or a file.
            model: Name of the model if `path` holds several.

        Raises:
            InvalidInput: There are none, or several models and none of this name.
            EngineUnavailable: pyarrow is not installed.
        """
        require_packages("reading a record", ["pyarrow"], extra="score")
        if not path.exists():
            raise InvalidInput(f"there is no {path}", hint="name the folder of graphkiln serve --record")
        files = [path] if path.is_file() else _files(path)
        if not files:
            models = {folder.name: found for folder in sorted(path.glob("*")) if (found := _files(folder))}
            if not models:
                raise InvalidInput(f"{path} holds no recorded requests", hint="graphkiln serve --record DIR makes some")
            name = model if model in models or len(models) > 1 else next(iter(models))
            if name not in models:
                near = did_you_mean(model, models, prefix=f"{path}/") if model else ""
                raise InvalidInput(
                    f"{path} holds requests of several models, and none of '{model}'"
                    if model
                    else f"{path} holds requests of several models",
                    hint=near or f"name one of its folders: {', '.join(models)}",
                )
            files = models[name]
        return cls(path=path, files=tuple(files))

    def count(self) -> int:
        """Count the requests, by the footers of the files.

        Raises:
            InvalidInput: A file is damaged, or is no record.
        """
        total = 0
        for path in self.files:
            with _opened(path) as file:
                total += file.metadata.num_rows if file else 0
        return total

    def requests(self, wanted: Collection[int] | None = None) -> Iterator[RecordedRequest]:
        """Yield requests; memory use is that of a row group.

        Args:
            wanted: Positions of requests; None for all.

        Raises:
            InvalidInput: A file is damaged, or is no record.
        """
        begin = 0
        for path in self.files:
            with _opened(path) as file:
                if file is None:
                    continue
                for group in range(file.num_row_groups):
                    positions = range(begin, begin + file.metadata.row_group(group).num_rows)
                    begin = positions.stop
                    if wanted is None or any(position in wanted for position in positions):
                        rows = zip(positions, _rows(file, group), strict=True)
                        yield from (_request(row) for position, row in rows if wanted is None or position in wanted)


@contextmanager
def _opened(path: Path) -> Iterator[pq.ParquetFile | None]:
    """Open a file; None if `--record-keep` has just removed it.

    Raises:
        InvalidInput: The file is damaged, or is no record.
    """
    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            if not {*schema().names} <= {*file.schema_arrow.names}:
                raise InvalidInput(f"{path} is no record of requests", hint="graphkiln serve --record DIR makes some")
            yield file
    except FileNotFoundError:
        yield None
    except (pa.ArrowException, OSError) as error:
        raise InvalidInput(f"{path} cannot be read: {error}") from error


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob(f"*{SUFFIX}") if path.is_file() and not path.name.startswith("."))


def _rows(file: pq.ParquetFile, group: int) -> Iterator[dict[str, Any]]:
    for batch in file.iter_batches(_ROWS_AT_A_TIME, row_groups=[group], columns=schema().names, use_threads=False):
        time = batch.schema.get_field_index("time")  # Python's times have no nanoseconds
        yield from batch.set_column(time, "time", batch.column(time).cast(pa.int64())).to_pylist()


def _request(row: Mapping[str, Any]) -> RecordedRequest:
    tensors = {"inputs": _read_tensors(row["inputs"]), "outputs": _read_tensors(row["outputs"]) or {}}
    return RecordedRequest(
        time_ns=row["time"], **{name: value for name, value in row.items() if name != "time"} | tensors
    )


# What a writer removes.


def remove_leftovers(folder: Path) -> None:
    """Remove unfinished files whose writers are dead.

    Raises:
        OSError: The folder cannot be read, or a file cannot be removed.
    """
    for path in folder.glob(f"*/.*{PARTIAL}"):
        with locked_if_dead(path) as dead:
            if dead:
                path.unlink(missing_ok=True)


def remove_old(folder: Path, *, keep_s: float, keep_bytes: int, now_s: float) -> None:
    """Remove the oldest files: those before a time, and those beyond a total size. Other files are left alone.

    Args:
        folder: Folder of all models.
        keep_s: Seconds to keep a file.
        keep_bytes: Size of all files to keep.
        now_s: Now, in seconds since 1970.

    Raises:
        OSError: The folder cannot be read, or a file cannot be removed.
    """
    oldest, total = file_name(max(0.0, now_s - keep_s), "0" * 8), 0
    for path in sorted(folder.glob(f"*/*{SUFFIX}"), key=lambda each: each.name, reverse=True):
        if not _FILE.fullmatch(path.name):
            continue
        with suppress(FileNotFoundError):  # another instance removed it
            total += path.lstat().st_size
            if path.name < oldest or total > keep_bytes:
                path.unlink()
