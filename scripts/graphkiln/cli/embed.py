"""`graphkiln embed`: images in, vectors out: printed, or with `--out` written to a Parquet file as they come."""

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
from graphkiln.cli.image_arguments import (
    FORMS,
    BatchSize,
    Concurrency,
    Encoded,
    Images,
    ask,
    check_formats,
    expand_folders,
    report_failures,
    show_progress,
    split_errors,
)
from graphkiln.cli.options import AsJson, ModelName, ModelVersion
from graphkiln.scoring import check_extra
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotReady, ProtocolError
from graphkiln_backend.graph.files import MIB
from graphkiln_backend.graph.modules import LazyModule

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    import pyarrow.parquet as pq

    from graphkiln_client import Client, Model
    from graphkiln_client.image_requests import Form

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
    out: Annotated[Path | None, typer.Option(help="Write a Parquet file instead.", metavar="FILE")] = None,
    normalize: Annotated[bool, typer.Option("--normalize", help="Divide vectors by their length.")] = False,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV, a column for each feature.")] = False,
) -> None:
    """Turn images into vectors.

    --json and --csv hold all of them. Exit code 1 when an image failed; the others are answered all the same.
    """
    check_formats([], None, as_json=as_json, as_csv=as_csv)
    batching = batch_size, concurrency
    if out:
        _check_out(out, printed=as_json or as_csv)
        _save(images, out, connection, (model, version, encoded), batching, normalize=normalize or None)
        return
    paths = expand_folders(images)
    found, failures = ask(
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


# Vectors of images in a Parquet file: a row for each image, and their origin in the schema's metadata.

# Endings of files that would be taken for something else than they are.
_OTHER_FORMATS = (".csv", ".json", ".jsonl", ".npy", ".npz", ".txt", ".tsv")
# Of a Parquet file. Source: the format's specification, "File format".
_BEGINNING = b"PAR1"
# Of vectors in memory at a time.
_PIECE_BYTES = 8 * MIB
_MOST_ROWS = 1 << 16


def _check_out(out: Path, *, printed: bool) -> None:
    """Refuse to take the place of anything but Parquet: of the first image, where `--out` was followed by `*.jpg`."""
    if printed:
        raise InvalidInput("--out writes a file: leave out --json and --csv")
    if out.suffix.lower() in _OTHER_FORMATS:
        hint = f"--out {out.with_suffix('.parquet')}"
        raise InvalidInput(f"--out writes Parquet, and {out} is named otherwise", hint=hint)
    check_extra("embed --out", ["pyarrow"])
    if not os.path.isfile(out):  # noqa: PTH113 - of a name that is too long, `Path.is_file` fails
        return  # `_replaced_file` reports what may not be there
    with out.open("rb") as file:
        if file.read(len(_BEGINNING)) not in (b"", _BEGINNING):
            raise InvalidInput(f"cannot write {out}: there is a file that is no Parquet", hint="name another one")


def _save(
    images: Sequence[Path],
    out: Path,
    connection: ConnectionOptions,
    served: tuple[str, str, bool | None],
    batching: tuple[int, int],
    *,
    normalize: bool | None,
) -> None:
    """Write the vectors of images, each once, sorted by path; all of them come from one version.

    Args:
        images: Files, and folders of them.
        out: The file; replaced when the new one is whole.
        connection: To the server.
        served: As for `ask`.
        batching: As for `ask`.
        normalize: As the client takes it.
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
        if not writer.rows:  # the file stays as it was
            split_errors([path for path, _ in failures], [error for _, error in failures])
            report_failures(failures)
        _, now = identify(client, origin.model, origin.version)
        if now != origin:  # another version of the same number, whose vectors differ
            message = f"{origin} was replaced while it embedded, by {now}: nothing is written"
            raise ModelNotReady(message, hint="embed the images again")
    say(f"{out}: {writer.rows} vectors of {writer.features} features, {writer.lengths_in_words}, by {origin}")
    report_failures(failures)


@contextmanager
def _replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of another when it is whole; a link stays one, and leads to the new file.

    After an error or Ctrl-C, nothing has changed.

    Raises:
        InvalidInput: It cannot be written there.
    """
    target = Path(os.path.realpath(path))
    new = target.parent / f".{target.name}.{os.getpid()}"
    try:
        if target.exists() and not target.is_file():
            raise InvalidInput(f"cannot write {path}: there is something that is no file")
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
    """Origin of vectors: the model version that computed them.

    Attributes:
        model: The model's name.
        version: Its version; "" if unknown.
        contract: Digest of the version's contract, such as the preprocessing of images; "" if it has none.
        graph: Digest of its graph and weights; "" if the server does not give it.
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
        """Format as metadata of a Parquet schema."""
        names = ("model", "version", "contract", "graph")
        return {f"graphkiln.{name}": getattr(self, name) for name in names}


def identify(client: Client, name: str, version: str, form: Form = "auto") -> tuple[Model, Origin]:
    """Pin the model version that answers now ("": the server's choice), so that no other takes its place meanwhile.

    Raises:
        ClientError: A request failed.
    """
    from graphkiln_client.remote_model import newest_version, published_contracts, published_graph

    version = version or newest_version(client.model(name).metadata)
    model = client.model(name, version, images=form)
    contracts = published_contracts(name, model.config)
    contract = contracts.find(version) if contracts else None
    graph = published_graph(name, model.config, version)
    return model, Origin(model=name, version=version, contract=contract.digest if contract else "", graph=graph)


class VectorWriter:
    """Writer of vectors, several MiB at a time; a context whose end makes the file readable.

    Attributes:
        rows: Number of vectors.
        features: Elements of each vector; 0 before the first.
        lengths: Least and greatest length of the finite vectors written; empty before one.
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
        """Add a row; bytes of a name that are not UTF-8 are written in hexadecimal.

        Raises:
            ProtocolError: The vector has no elements, or more or less than those before.
            OSError: It cannot be written.
        """
        self.features = self.features or len(vector)
        if not len(vector) == self.features > 0:
            raise ProtocolError(f"the model gives vectors of {self.features} and of {len(vector)} features")
        self._sources.append(os.fsencode(source).decode("utf-8", "backslashreplace"))
        self._vectors.append(vector)
        self.rows += 1
        if len(self._sources) >= max(1, min(_MOST_ROWS, _PIECE_BYTES // (4 * self.features))):
            self._flush()

    @property
    def lengths_in_words(self) -> str:
        """Report whether vectors are normalized: some searches assume it."""
        if not self.lengths:
            return "none of which is finite"
        shortest, longest = (f"{length:.4g}" for length in self.lengths)
        return f"of length {shortest}" if shortest == longest else f"of lengths from {shortest} to {longest}"

    def _flush(self) -> None:
        """Write what was added since as one row group."""
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
