"""Messages between the load generator and its processes: pickled, through their pipes."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

from graphkiln.bench.arrivals import Moments
from graphkiln_backend.graph.dtypes import AnyArray

Feeds = Mapping[str, AnyArray]


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """The model that is loaded.

    Attributes:
        client: Arguments of `Client`, with the `url`.
        model: Model name.
        version: Model version; empty for the server's choice.
        shared_memory: Whether tensors travel through shared memory.
    """

    client: Mapping[str, Any]
    model: str
    version: str = ""
    shared_memory: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """The amount of load.

    Attributes:
        callers: Requests that may be in flight at once; in a closed loop, that always are.
        seconds: How long to measure.
        warmup_s: How long requests are sent before that.
        arrivals: When the requests of an open loop are due, from the start of the warm-up; None for a closed loop.
    """

    callers: int
    seconds: float
    warmup_s: float
    arrivals: Moments | None = None

    def share(self, number: int, processes: int) -> Load:
        """The part of one process: of the callers as of the arrivals."""
        arrivals = None if self.arrivals is None else self.arrivals[number::processes]
        callers = len(range(number, self.callers, processes))
        return Load(callers=callers, seconds=self.seconds, warmup_s=self.warmup_s, arrivals=arrivals)


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The work of one process.

    Attributes:
        target: What it loads.
        load: How much.
        samples: What its requests hold, in turn.
    """

    target: Target
    load: Load
    samples: Sequence[Feeds]


def send_message(pipe: IO[bytes], value: object) -> None:
    """Write a value."""
    pickle.dump(value, pipe)
    pipe.flush()


def receive_message(pipe: IO[bytes]) -> Any:
    """Read a value of a process that this program has started, or was started by.

    Raises:
        EOFError: The other side has ended.
    """
    return pickle.load(pipe)  # noqa: S301 - from our own process, through its own pipe
