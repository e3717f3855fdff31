"""Names in order, however many there are: what does not fit into memory is sorted in runs on disk and merged."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from tempfile import TemporaryFile
from typing import IO

_RUN = 500_000
_PIECE = 1 << 16


def sort_names(names: Iterable[bytes], run: int = _RUN) -> Iterator[bytes]:
    """Sorts names, none of which holds a null.

    Args:
        names: The names.
        run: Most of them that are held in memory.
    """
    unsorted = iter(names)
    first = sorted(islice(unsorted, run))
    if len(first) < run:
        yield from first
        return
    with ExitStack() as stack:
        runs: list[Iterator[bytes]] = []
        while first:
            file = stack.enter_context(TemporaryFile(prefix="graphkiln-names-"))
            runs.append(_written(file, first))
            first = sorted(islice(unsorted, run))
        yield from heapq.merge(*runs)


def _written(file: IO[bytes], names: list[bytes]) -> Iterator[bytes]:
    file.write(b"\0".join(names))
    file.seek(0)
    return _read(file)


def _read(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while piece := file.read(_PIECE):
        *whole, rest = (rest + piece).split(b"\0")
        yield from whole
    yield rest
