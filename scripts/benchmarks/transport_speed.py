"""What joining two shards takes: sums in the memory of one process, as we serve them, beside gloo's between two.

Both have the same two cores. Ours is the session of two shards that compute nothing: their partial sums are there, so
that what is left is waking both threads, and adding. Gloo's is `torch.distributed.all_reduce` of two processes over the
loopback interface; they compute nothing either.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
from measurement import ratio_of, show_progress

from graphkiln_backend.engines.base import Placement
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import LoweringError, MeasurementError
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.lowering.parallel.shards import Segment, ShardedSession
from graphkiln_backend.lowering.parallel.worker import Worker
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import usable_core_numbers

SUMS = {
    "8 KiB: a row of 2048": 2048,
    "384 KiB: BERT-base, a row of 128 tokens": 128 * 768,
    "12 MiB: BERT-base, 32 rows": 32 * 128 * 768,
}
"""Elements of fp32."""
_LEAST_RUNS = 5
_TIMEOUT_S = 120.0

Measure = Callable[[int, int], float]
"""Elements of a sum, runs -> seconds of one."""


def benchmark_sums(rounds: int, seconds: float) -> list[dict[str, object]]:
    """Sums of several sizes, both ways in turn."""
    first, *others = usable_core_numbers()
    if not others:
        raise LoweringError("two cores are compared", attempts=("one core is here",))
    with gloo_pair((first, others[0])) as gloo:
        ways = {"in the process": in_process((first, others[0])), "gloo": gloo}
        return [_row(name, elements, ways, rounds, seconds / len(SUMS)) for name, elements in SUMS.items()]


def _row(name: str, elements: int, ways: Mapping[str, Measure], rounds: int, seconds: float) -> dict[str, object]:
    """A size: microseconds of each way, and how often faster sums in the process are."""
    runs = {way: max(_LEAST_RUNS, int(seconds / measure(elements, _LEAST_RUNS))) for way, measure in ways.items()}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(rounds):
        for way, measure in ways.items():
            show_progress(f"round {number + 1}/{rounds}: {name}, {way}")
            times[way].append(measure(elements, runs[way]))
    show_progress("")
    ours, gloo = ([1 / seconds for seconds in times[way]] for way in ("in the process", "gloo"))
    ratio = ratio_of(ours, gloo)
    medians = {f"{way}, us": round(float(np.median(found)) * 1e6, 1) for way, found in times.items()}
    return {"sum": name, **medians, "ratio": ratio.median, "spread": ratio.spread}


@dataclass(frozen=True, kw_only=True, slots=True)
class _Ready(Closeable):
    """A shard whose partial sum is there."""

    partial: AnyArray
    signature: Signature

    def run(self, _: Mapping[str, AnyArray], outputs: Sequence[str] | None = None) -> dict[str, AnyArray]:
        """Computes nothing."""
        return dict.fromkeys(outputs or ("partial",), self.partial)

    def placement(self, _: Mapping[str, AnyArray]) -> Placement:
        """Nothing ran."""
        return Placement(nodes={}, precision=Precision.FP32)

    def close(self) -> None:
        """Holds nothing."""


def in_process(cores: tuple[int, int]) -> Measure:
    """Sums as a `ShardedSession` of two shards makes them.

    Args:
        cores: One for each shard.
    """

    def measure(elements: int, runs: int) -> float:
        spec = TensorSpec(name="sum", dtype=DType.FP32, shape=(elements,))
        signature = Signature(inputs=(), outputs=(spec,))
        shards = tuple(_Ready(partial=np.full(elements, rank + 1, np.float32), signature=signature) for rank in (0, 1))
        segment = Segment(sessions=shards, inputs=(), outputs=("partial",), reduced={"partial": "sum"})
        workers = [Worker((core,)) for core in cores]
        with ShardedSession([segment], workers, signature) as session:
            _check(session.run({})["sum"])
            begun = time.perf_counter()
            for _ in range(runs):
                session.run({})
            return (time.perf_counter() - begun) / runs

    return measure


@contextmanager
def gloo_pair(cores: tuple[int, int]) -> Iterator[Measure]:
    """Two processes that sum by gloo; they end with the block.

    Args:
        cores: One for each process.

    Raises:
        MeasurementError: They do not find each other, or die.
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe() for _ in cores]
        processes = [
            context.Process(target=_sum_by_gloo, args=(end, rank, core, Path(folder)), daemon=True)
            for rank, (core, (_, end)) in enumerate(zip(cores, pipes, strict=True))
        ]
        for process, (_, end) in zip(processes, pipes, strict=True):
            process.start()
            end.close()  # so that one that dies is noticed

        def measure(elements: int, runs: int) -> float:
            for own, _ in pipes:
                own.send((elements, runs))
            return max(_receive(own) for own, _ in pipes)

        try:
            yield measure
        finally:
            for process in processes:
                process.terminate()
                process.join()


def _receive(connection: Connection) -> float:
    try:
        if connection.poll(_TIMEOUT_S):
            return float(connection.recv())
    except EOFError:
        pass
    raise MeasurementError("gloo: a process does not answer", hint="what it wrote before stands above")


def _sum_by_gloo(connection: Connection, rank: int, core: int, folder: Path) -> None:
    """A process of the pair: sums what it is told to until it is ended."""
    os.sched_setaffinity(0, {core})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    from torch import distributed

    torch.set_num_threads(1)
    rendezvous = f"file://{folder / 'rendezvous'}"
    distributed.init_process_group(
        "gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=_TIMEOUT_S)
    )
    while True:
        elements, runs = connection.recv()
        tensor = torch.full((elements,), rank + 1, dtype=torch.float32)
        distributed.all_reduce(tensor)
        _check(tensor.numpy())
        zeros = torch.zeros(elements)  # stays so, however often it is summed
        distributed.barrier()
        begun = time.perf_counter()
        for _ in range(runs):
            distributed.all_reduce(zeros)
        connection.send((time.perf_counter() - begun) / runs)


def _check(total: AnyArray) -> None:
    """Raises a `MeasurementError` where a sum is wrong: its time would mean nothing."""
    if not (total == 3).all():
        raise MeasurementError("a sum of 1 and 2 is not 3")
