"""Vectors of images in a Parquet file: a row for each image, and their origin in the schema's metadata."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_backend.graph.files import MIB

if TYPE_CHECKING:
    from graphkiln_client import Client, Model
    from graphkiln_client.preparing import Form

_KEYS = {
    "model": "graphkiln.model",
    "version": "graphkiln.version",
    "contract": "graphkiln.contract",
    "graph": "graphkiln.graph",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """Origin of vectors: the model version that computed them.

    Attributes:
        model: The model's name.
        version: Its version; "" if unknown.
        contract: Digest of the version's contract, such as the preprocessing of images; "" if it has none.
        graph: Digest of its graph and weights; "" if the server, or an older file, does not give it.
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
        return {key: getattr(self, name) for name, key in _KEYS.items()}


def identify(client: Client, name: str, version: str, form: Form = "auto") -> tuple[Model, Origin]:
    """Pin the model version that answers now, so that no other takes its place meanwhile.

    Args:
        client: Client of the server.
        name: The model's name.
        version: A version; empty for the server's choice.
        form: Form in which images travel.

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


SOURCE, VECTOR = "source", "vector"
# Of vectors in memory at a time; the search, in float64, takes some six times that.
_PIECE_BYTES = 8 * MIB
_MOST_ROWS = 1 << 16
# Of a Parquet file. Source: the format's specification, "File format".
_BEGINNING = b"PAR1"


@contextmanager
def replaced_file(path: Path) -> Iterator[BinaryIO]:
    """A new file that takes the place of another when it is whole; after an error or Ctrl-C, nothing has changed.

    Args:
        path: The file; where it is a link, what that leads to.

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


def check_replaceable(path: Path) -> None:
    """Refuse to take the place of anything but Parquet: of the first image, where `--out` was followed by `*.jpg`.

    Raises:
        InvalidInput: There is something else.
    """
    if not os.path.isfile(path):  # noqa: PTH113 - of a name that is too long, `Path.is_file` fails
        return  # `replaced_file` reports what may not be there
    with path.open("rb") as file:
        head = file.read(len(_BEGINNING))
    if head not in (b"", _BEGINNING):
        raise InvalidInput(f"cannot write {path}: there is a file that is no Parquet", hint="name another one")


class VectorWriter:
    """Writer of vectors, several MiB at a time; a context whose end makes the file readable.

    Args:
        file: Target; stays open.
        origin: The version that computes the vectors.

    Attributes:
        rows: Number of vectors.
        features: Elements of each vector; 0 before the first.
        lengths: Least and greatest length of the finite vectors written; empty before one.
    """

    def __init__(self, file: BinaryIO, origin: Origin) -> None:
        self._file, self._metadata = file, origin.to_metadata()
        self._writer: pq.ParquetWriter | None = None
        self._sources: list[str] = []
        self._vectors: list[npt.NDArray[np.float32]] = []
        self.rows = self.features = 0
        self.lengths: tuple[float, ...] = ()

    def __enter__(self) -> VectorWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self._flush()
        if self._writer:
            self._writer.close()

    def add(self, source: Path, vector: npt.NDArray[np.float32]) -> None:
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
        if len(self._sources) >= _rows_of(self.features):
            self._flush()

    def _flush(self) -> None:
        """Write what was added since as one row group."""
        if not self._sources:
            return
        schema = self._schema()
        if self._writer is None:
            self._writer = pq.ParquetWriter(self._file, schema, compression="zstd", use_dictionary=False)
        values = pa.array(np.concatenate(self._vectors).astype(np.float32, copy=False))
        columns = [pa.array(self._sources), pa.FixedSizeListArray.from_arrays(values, self.features)]
        self._writer.write_batch(pa.record_batch(columns, schema=schema))
        self._measure()
        self._sources, self._vectors = [], []

    def _measure(self) -> None:
        lengths = np.linalg.norm(np.stack(self._vectors).astype(np.float64), axis=1)
        found = [*self.lengths, *lengths[np.isfinite(lengths)].tolist()]
        self.lengths = (min(found), max(found)) if found else ()

    def _schema(self) -> pa.Schema:
        columns = [(SOURCE, pa.string()), (VECTOR, pa.list_(pa.float32(), self.features))]
        return pa.schema(columns, metadata=self._metadata)


def _rows_of(features: int) -> int:
    """Number of vectors that are held at a time."""
    return max(1, min(_MOST_ROWS, _PIECE_BYTES // (4 * features)))
