"""Whoever reads a file of a storage gets what goes wrong in our words."""

from __future__ import annotations

import io
import tarfile
from typing import BinaryIO, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from graphkiln_backend.scoring.errors import ScoringError, SourceUnavailable
from graphkiln_backend.scoring.sources.places import OpenedFile


class _Faulty(io.BytesIO):
    """Raises what it is given once the position is before a limit."""

    error: Exception | None = None
    limit = 1 << 40

    def read(self, size: int | None = -1, /) -> bytes:
        if self.error and self.tell() < self.limit:
            raise self.error
        return super().read(size)


def opened(content: bytes) -> tuple[_Faulty, BinaryIO]:
    faulty = _Faulty(content)
    return faulty, cast("BinaryIO", OpenedFile(faulty, lambda error: SourceUnavailable(f"not now: {error}")))


def test_it_reaches_whoever_reads_parquet_through_arrow() -> None:
    """Arrow must not make an error of its own of it: that would be taken for damage."""
    content = io.BytesIO()
    pq.write_table(pa.table({"image": [bytes(1000)] * 100}), content, use_dictionary=False, compression="none")
    raw, file = opened(content.getvalue())
    with pq.ParquetFile(file, pre_buffer=False, buffer_size=1 << 12) as parquet:
        raw.error, raw.limit = RuntimeError("reset"), 90_000
        with pytest.raises(SourceUnavailable, match="not now: reset"):
            next(parquet.iter_batches(16))


def test_it_reaches_whoever_reads_a_tar() -> None:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("a"))
    raw, file = opened(content.getvalue())
    with tarfile.open(fileobj=file, mode="r:") as archive:
        archive.next()
        raw.error = ScoringError("denied")
        with pytest.raises(ScoringError, match="denied"):
            archive.next()
