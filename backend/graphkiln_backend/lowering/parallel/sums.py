"""How stages and shards hand tensors to each other: where these are, and what adds partial sums.

On the CPU all of them are threads of one process: what one computes, the others read where it lies, and sums are added
there. Between GPUs that would be twice the way over the host; see `device_sums`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from graphkiln_backend.engines.base import Session
from graphkiln_backend.graph.dtypes import AnyArray

Tensor = Any
"""An array, or a tensor on a device: whatever `run` gives."""


class Handing(Protocol):
    """Runs sessions whose outputs others read."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """Computes a part; called by the thread of its stage or shard.

        Args:
            session: Of the part.
            feeds: Arrays of the request, and what `run` gave before, or `Sums.add`.
            outputs: Names.

        Raises:
            GraphkilnError: As `Session.run`.
        """
        ...

    def fetch(self, tensor: Tensor) -> AnyArray:
        """A tensor of a shard as an array in the memory of the process."""
        ...


class Sums(Handing, Protocol):
    """Adds what shards computed, too; used by one thread."""

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """The sum of what shards computed, for each of them; none of the partial sums is changed.

        Args:
            partials: Of equal shapes, shard by shard.
        """
        ...


class HostSums:
    """In the memory of the process; see `Sums`."""

    def run(self, session: Session, feeds: Mapping[str, Tensor], outputs: Sequence[str]) -> Mapping[str, Tensor]:
        """See `Handing.run`."""
        return session.run(feeds, outputs)

    def add(self, partials: Sequence[Tensor]) -> Sequence[Tensor]:
        """See `Sums.add`: every shard reads the same array."""
        return [add_up(partials)] * len(partials)

    def fetch(self, tensor: Tensor) -> AnyArray:
        """See `Handing.fetch`."""
        array: AnyArray = tensor
        return array


def add_up(partials: Sequence[AnyArray]) -> AnyArray:
    """The sum of what shards computed, in their order: a new array.

    Args:
        partials: Of equal shapes, at least one.
    """
    total = partials[0].copy()
    for partial in partials[1:]:
        np.add(total, partial, out=total)
    return total
