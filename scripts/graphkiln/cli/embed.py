"""`graphkiln embed`: compute image embeddings; print them or stream them to a Parquet file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import ending_in_order, print_csv, print_json, print_table, say
from graphkiln.cli.images import (
    FORMS,
    BatchSize,
    Concurrency,
    Encoded,
    Images,
    check_formats,
    expand_folders,
    report_failures,
    send_images,
    show_progress,
    split_errors,
)
from graphkiln.cli.options import AsJson, ModelName, ModelVersion
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotReady, ProtocolError
from graphkiln_backend.graph.files import MIB
from graphkiln_backend.graph.modules import LazyModule, require_packages

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.parquet as pq

    from graphkiln_client import Client, Model
    from graphkiln_client.preparing import Form

    Vector = npt.NDArray[np.float32]
else:
    np, pa, pq = LazyModule("numpy"), LazyModule("pyarrow"), LazyModule("pyarrow.parquet")


@with_connection()
def embed(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
    out: Annotated[Path | None, typer.Option(help="Write to a Parquet file.", metavar="FILE")] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Scale vectors to length 1.")] = False,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV with a column for each feature.")] = False,
) -> None:
    """Compute embeddings of images.

    --json and --csv contain whole vectors. Exit code 1 when an image failed; the results of the others are shown.
    """
    check_formats([], None, as_json=as_json, as_csv=as_csv)
    batching = batch_size, concurrency
    if out:
        _check_out(out, printed=as_json or as_csv)
        _save(images, out, connection, (model, version, encoded), batching, normalize=normalize or None)
        return
    paths = expand_folders(images)
    found, failures = send_images(
        connection, (model, version, encoded), paths, batching,
        lambda served, options: served.embed_many(paths, normalize=normalize or None, **options),
    )  # fmt: skip
    if as_json:
        print_json([{"source": str(path), "vector": vector.tolist()} for path, vector in found], indent=None)
    elif as_csv and found:
        columns = ["source", *(f"v{place}" for place in range(len(found[0][1])))]
        print_csv(columns, ([path, *vector.tolist()] for path, vector in found))
    elif found:
        _print_table(found)
    report_failures(failures)


def _print_table(found: Sequence[tuple[Path, Vector]]) -> None:
    rows = []
    for path, vector in found:
        begin = " ".join(f"{value:.4f}" for value in vector[:4])
        length = float((vector.astype("float64") ** 2).sum() ** 0.5)
        rows.append((path.name, str(len(vector)), f"{length:.4f}", begin))
    print_table(("image", "features", "length", "begins with"), rows)


# Parquet output: a row for each image, and the origin of the vectors in the schema's metadata.

# Suffixes that imply a format other than Parquet.
_OTHER_FORMATS = (".csv", ".json", ".jsonl", ".npy", ".npz", ".txt", ".tsv")
# First bytes of a Parquet file. Source: Parquet specification, "File format".
_MAGIC = b"PAR1"
_ROW_GROUP_BYTES = 8 * MIB  # buffered before a row group is written
_MAX_ROW_GROUP_ROWS = 1 << 16


def _check_out(out: Path, *, printed: bool) -> None:
    """Refuse to overwrite files in other formats, such as an image after `--out *.jpg`."""
    if printed:
        raise InvalidInput("--out cannot be combined with --json or --csv", hint="remove one of them")
    if out.suffix.lower() in _OTHER_FORMATS:
        hint = f"--out {out.with_suffix('.parquet')}"
        raise InvalidInput(f"--out writes Parquet, but {out} has the suffix of another format", hint=hint)
    require_packages("embed --out", ["pyarrow"], extra="score")
    if not os.path.isfile(out):  # noqa: PTH113 - `Path.is_file` raises for a name that is too long
        return  # `_replaced_file` reports other errors
    with out.open("rb") as file:
        if file.read(len(_MAGIC)) not in (b"", _MAGIC):
            raise InvalidInput(f"cannot write {out}: the existing file is not a Parquet file", hint="rename it")


def _save(
    images: Sequence[Path],
    out: Path,
    connection: ConnectionOptions,
    served: tuple[str, str, bool | None],
    batching: tuple[int, int],
    *,
    normalize: bool | None,
) -> None:
    """Write the vectors of distinct images, sorted by path and computed by a single model version.

    Args:
        images: Files and folders.
        out: Output file; an existing one is replaced at the end.
        connection: Connection options.
        served: As for `send_images`.
        batching: As for `send_images`.
        normalize: Argument of the client.
    """
    paths, failures = sorted(set(expand_folders(images))), []
    name, version, encoded = served
    with ending_in_order(), _replaced_file(out) as file, connection.connect() as client:
        pinned, origin = identify(client, name, version, FORMS[encoded])
        with VectorWriter(file, origin) as writer, show_progress(len(paths)) as progress:
            answers = pinned.embed_many(
                paths, normalize=normalize, progress=progress, on_error="return",
                batch_size=batching[0], concurrency=batching[1],
            )  # fmt: skip
            for path, answer in zip(paths, answers, strict=True):
                if isinstance(answer, ClientError):
                    failures.append((path, answer))
                else:
                    writer.add(path, answer)
        if not writer.rows:  # keep the existing file
            split_errors([path for path, _ in failures], [error for _, error in failures])
            report_failures(failures)
        _, now = identify(client, origin.model, origin.version)
        if now != origin:  # the version was replaced, and its vectors may differ
            message = f"{origin} was replaced by {now} during the run: nothing is written"
            raise ModelNotReady(message, hint="run the command again")
    say(f"{out}: {writer.rows} vectors of {writer.features} features, {writer.lengths_in_words}, by {origin}")
    report_failures(failures)


@contextmanager
def _replaced_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that replaces `path` at the end of the context; links are followed.

    Nothing is changed after an error or Ctrl-C.

    Raises:
        InvalidInput: The file is not writable.
    """
    target = Path(os.path.realpath(path))
    new = target.parent / f".{target.name}.{os.getpid()}"
    try:
        if target.exists() and not target.is_file():
            raise InvalidInput(f"cannot write {path}: not a regular file")
        file = new.open("wb")
    except OSError as error:
        raise InvalidInput(f"cannot write {path}: {error.strerror or error}") from error
    try:
        with file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        new.replace(target)
    finally:
        new.unlink(missing_ok=True)


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Model version that computed vectors.

    Attributes:
        model: Name of the model.
        version: Version; "" if unknown.
        contract: Digest of the contract (preprocessing and so on); "" if there is none.
        graph: Digest of graph and weights; "" if unknown.
    """

    model: str
    version: str
    contract: str
    graph: str = ""

    def __str__(self) -> str:
        names = [f"'{self.model}'", *([f"version {self.version}"] if self.version else [])]
        known = {"contract": self.contract, "graph": self.graph}
        digests = ", ".join(f"{what} {digest}" for what, digest in known.items() if digest)
        return " ".join([*names, *([f"({digests})"] if digests else [])])

    def to_metadata(self) -> dict[str, str]:
        """Return metadata for a Parquet schema."""
        names = ("model", "version", "contract", "graph")
        return {f"graphkiln.{name}": getattr(self, name) for name in names}


def identify(client: Client, name: str, version: str, form: Form = "auto") -> tuple[Model, Origin]:
    """Open a fixed version of a model ("" for the server's choice), so that vectors come from a single version.

    Raises:
        ClientError: A request failed.
    """
    from graphkiln_client.published import newest_version, published_contracts, published_graph

    version = version or newest_version(client.model(name).metadata)
    model = client.model(name, version, images=form)
    contracts = published_contracts(name, model.config)
    contract = contracts.find(version) if contracts else None
    graph = published_graph(name, model.config, version)
    return model, Origin(model=name, version=version, contract=contract.digest if contract else "", graph=graph)


class VectorWriter:
    """Context that writes vectors in row groups of several MiB.

    Attributes:
        rows: Number of vectors.
        features: Number of elements per vector; 0 before the first.
        lengths: Minimum and maximum length of the finite vectors; empty before the first.
    """

    def __init__(self, file: BinaryIO, origin: Origin) -> None:
        self._file, self._origin = file, origin
        self._writer: pq.ParquetWriter | None = None
        self._sources: list[str] = []
        self._vectors: list[Vector] = []
        self.rows = self.features = 0
        self.lengths: tuple[float, ...] = ()

    def __enter__(self) -> VectorWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        if self._writer:
            self._writer.close()

    def add(self, source: Path, vector: Vector) -> None:
        """Add a row; invalid UTF-8 in a name is escaped.

        Raises:
            ProtocolError: The vector is empty or differs in length from the others.
            OSError: The file is not writable.
        """
        self.features = self.features or len(vector)
        if not len(vector) == self.features > 0:
            raise ProtocolError(f"the model returned vectors of {self.features} and {len(vector)} features")
        self._sources.append(os.fsencode(source).decode("utf-8", "backslashreplace"))
        self._vectors.append(vector)
        self.rows += 1
        if len(self._sources) >= max(1, min(_MAX_ROW_GROUP_ROWS, _ROW_GROUP_BYTES // (4 * self.features))):
            self._flush()

    @property
    def lengths_in_words(self) -> str:
        """Description of the lengths: some search indexes assume normalized vectors."""
        if not self.lengths:
            return "none finite"
        shortest, longest = (f"{length:.4g}" for length in self.lengths)
        return f"of length {shortest}" if shortest == longest else f"of lengths from {shortest} to {longest}"

    def _flush(self) -> None:
        """Write the buffered rows as a row group."""
        if not self._sources:
            return
        columns = [("source", pa.string()), ("vector", pa.list_(pa.float32(), self.features))]
        schema = pa.schema(columns, metadata=self._origin.to_metadata())
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, schema, compression="zstd", use_dictionary=False)
        vectors = np.stack(self._vectors).astype(np.float32, copy=False)
        values = pa.FixedSizeListArray.from_arrays(pa.array(vectors.reshape(-1)), self.features)
        self._writer.write_batch(pa.record_batch([pa.array(self._sources), values], schema=schema))
        lengths = np.linalg.norm(vectors.astype(np.float64), axis=1)
        found = [*self.lengths, *lengths[np.isfinite(lengths)].tolist()]
        self.lengths = (min(found), max(found)) if found else ()
        self._sources, self._vectors = [], []
