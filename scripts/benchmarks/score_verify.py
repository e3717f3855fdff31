"""How long it takes to see what a destination holds: by listing, as a run that goes on does, and by reading all of it.

The files have the shape of results of a classifier: ids, five classes with labels and scores, an error now and then.
They lie in memory (/dev/shm), so that this measures our work and not a disk's.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination, encode_result, object_name
from graphkiln_backend.scoring.units import InputRange, Unit
from graphkiln_backend.scoring.verify import verify

_MEMORY = Path("/dev/shm")  # noqa: S108 - its folder is made by tempfile
_CLASSES = 5


class VerifyTimes(TypedDict):
    """Seconds of a destination of `units` units.

    `list_s` is what a run needs that goes on, `verify_s` the whole verification, `verify_cpu_s` the processor time of
    it, `units_per_s` units verified a second, `grown_mb` by how much the process's most memory grew meanwhile.
    """

    units: int
    rows: int
    list_s: float
    verify_s: float
    verify_cpu_s: float
    units_per_s: float
    grown_mb: float


def measure_verify(units: int, rows_per_unit: int = 1000) -> VerifyTimes:
    """Measure listing and verification of a destination in memory.

    Raises:
        MeasurementError: The verification found something in what is whole.
    """
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
        destination = ParquetDestination(FolderStore(Path(folder)))
        planned = list(_write(Path(folder), units, rows_per_unit))
        begun = time.perf_counter()
        committed = set(destination.committed_ids())
        listed, worked, most = time.perf_counter(), time.process_time(), _most_memory_mb()
        found = verify(destination, planned)
        ended, worked = time.perf_counter(), time.process_time() - worked
    if len(committed) != units or not found.ok:
        raise MeasurementError(f"{units} whole units were written, and {len(committed)} found: {found.findings[:3]}")
    return VerifyTimes(
        units=units,
        rows=found.inputs,
        list_s=listed - begun,
        verify_s=ended - listed,
        verify_cpu_s=worked,
        grown_mb=_most_memory_mb() - most,
        units_per_s=units / (ended - listed),
    )


def _most_memory_mb() -> float:
    """Resident, of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _write(folder: Path, units: int, rows: int) -> Iterator[Unit]:
    """Write results as they are committed, without waiting for a disk; they differ in their ids."""
    answers = _answers(rows, np.random.default_rng(0))
    for number in range(units):
        path = f"photos/{number:08}"
        unit = InputRange(path=path, part="", identity=str(number), rows=rows).unit("model")
        ids = pa.array([f"{path}/{index:06}.jpg" for index in range(rows)])
        table = answers.add_column(0, "id", ids)
        result = Result(unit_id=unit.id, configuration="model", table=table)
        (folder / object_name(unit.id)).write_bytes(encode_result(result, str(number)))
        yield unit


def _answers(rows: int, generator: np.random.Generator) -> pa.Table:
    ends = pa.array(np.arange(rows + 1, dtype=np.int32) * _CLASSES)
    classes = generator.integers(0, 1000, rows * _CLASSES, np.int32)
    labels = pa.array(np.char.add("class ", classes.astype(str)))
    scores = generator.random(rows * _CLASSES, np.float32)
    return pa.table(
        {
            "indices": pa.ListArray.from_arrays(ends, pa.array(classes)),
            "labels": pa.ListArray.from_arrays(ends, labels),
            "scores": pa.ListArray.from_arrays(ends, pa.array(scores)),
            "error": pa.array(["not an image" if index == 7 else None for index in range(rows)], pa.string()),
        }
    )
