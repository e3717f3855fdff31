"""How far a worker has come, in memory that outlives it: whoever watches it sees that it goes on, or where it ended."""

from __future__ import annotations

import mmap
import os
from contextlib import AbstractContextManager
from types import TracebackType

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray

_SLOTS = 8
_NUMBER, _REACHED, _COMMITTING = range(3)
_WORD = np.dtype(np.int64)
_SIZE = (1 + 3 * _SLOTS) * _WORD.itemsize


class Progress:
    """A counter that grows while anything happens, and for each attempt under way the rows that were begun.

    Args:
        descriptor: Of the memory, as `create` made it; a child process inherits it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        words = np.frombuffer(self._memory, _WORD)
        self._counter, self._slots = words[:1], words[1:].reshape(_SLOTS, 3)

    @classmethod
    def create(cls) -> Progress:
        """New memory, without a name: it vanishes with the last process that has it."""
        descriptor = os.memfd_create("graphkiln-progress")
        os.ftruncate(descriptor, _SIZE)
        return cls(descriptor)

    def close(self) -> None:
        """Gives the memory back; a second call does nothing."""
        if self._memory.closed:
            return
        del self._counter, self._slots
        self._memory.close()
        os.close(self.descriptor)

    @property
    def counter(self) -> int:
        """Another value than before where anything has happened since."""
        return int(self._counter[0])

    @property
    def reached(self) -> dict[int, int]:
        """Rows that were begun, by the number of the attempt."""
        return {int(number): int(rows) for number, rows, _ in self._slots if number}

    @property
    def committing(self) -> frozenset[int]:
        """Attempts that are being written."""
        return frozenset(int(number) for number, _, committing in self._slots if number and committing)

    def track(self, number: int) -> Track:
        """A place for an attempt.

        Args:
            number: Of the attempt, 1 or more.
        """
        return Track(self._counter, self._slots, number)


class Track(AbstractContextManager["Track"]):
    """What one attempt tells of itself, from any thread. Made by `Progress.track`."""

    def __init__(self, counter: AnyArray, slots: AnyArray, number: int) -> None:
        free = int(np.flatnonzero(slots[:, _NUMBER] == 0)[0])
        self._counter, self._slot = counter, slots[free]
        self._slot[:] = (number, 0, 0)

    def __exit__(self, kind: type[BaseException] | None, value: object, traceback: TracebackType | None) -> None:
        self._slot[:] = 0
        self.advance()

    def advance(self) -> None:
        """Something has happened."""
        self._counter[0] += 1

    def reach(self, rows: int) -> None:
        """So many rows were begun."""
        self._slot[_REACHED] = rows
        self.advance()

    def commit(self) -> None:
        """All rows are computed: from now on none of them is to blame."""
        self._slot[_COMMITTING] = 1
        self.advance()
