"""Time and memory of plans of millions of rows (listing, resuming, a simulated hundred millions), and of verification.

Each part of a plan runs in a separate process, whose peak memory is its own. Interpreter and libraries are part of
that; what they take is measured beside.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import numpy as np
import pyarrow as pa

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination, encode_result, object_name
from graphkiln_backend.scoring.messages import InputRange, Unit
from graphkiln_backend.scoring.plan import PlanTotals, read_plan, write_plan
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.scoring.verify import verify

_MEMORY = Path("/dev/shm")  # noqa: S108 - its folder is made by tempfile
_CLASSES = 5
ROWS_PER_UNIT = 1000
RESUMED_UNITS = 25_000
SIMULATED_ROWS = 100_000_000
_BYTES_PER_FILE = 60  # bytes of a plan that a file of a folder takes: its name, size and time


def measure_plan(rows: int) -> dict[str, Any]:
    """Measure a plan.

    Returns:
        For `listing`, `resume` and `simulated`: `seconds`, `peak_mb` (resident, with interpreter and libraries), and
        how much was planned; `imports_mb` is what interpreter and libraries take by themselves.
    """
    with tempfile.TemporaryDirectory(prefix="graphkiln-plan-") as name:
        folder = Path(name)
        listing = folder / "listing.txt"
        _write_listing(listing, rows)
        return {
            "imports_mb": _apart(_nothing, folder)["peak_mb"],
            "listing": _apart(_plan_listing, listing),
            "resume": _apart(_resume, folder),
            "simulated": _apart(_simulate, folder),
        }


def _plan_listing(listing: Path) -> dict[str, Any]:
    ranges = FileSource(str(listing), Columns()).ranges(ROWS_PER_UNIT)
    return _describe(write_plan(listing.with_suffix(".parquet"), ranges, "configuration"))


def _resume(folder: Path) -> dict[str, Any]:
    """Finished units, each with a file of its own, are listed and left out of a plan; planning is not part of it."""
    from graphkiln_backend.scoring.messages import ScoreRequest
    from graphkiln_backend.scoring.plan import open_destination

    plan, results = folder / "resume.parquet", folder / "results"
    results.mkdir()
    write_plan(plan, _simulated(RESUMED_UNITS * ROWS_PER_UNIT), "configuration")
    for unit in read_plan(plan):
        (results / f"{unit.id}.parquet").touch()
    begun = time.monotonic()
    destination = open_destination(ScoreRequest(source="", model="", destination=str(results)))
    committed = set(destination.committed_ids())
    open_units = sum(unit.id not in committed for unit in read_plan(plan))
    return {"units": len(committed), "open": open_units, "seconds": time.monotonic() - begun}


def _simulate(folder: Path) -> dict[str, Any]:
    """A plan of ranges that no listing holds: what is measured is ids, writing and reading."""
    plan = folder / "simulated.parquet"
    described = _describe(write_plan(plan, _simulated(SIMULATED_ROWS), "configuration"))
    read = sum(unit.rows for unit in read_plan(plan))
    return described | {"read_rows": read, "plan_mb": plan.stat().st_size / 1e6}


def _simulated(rows: int) -> Iterator[InputRange]:
    """Ranges whose parts are as long as those of a folder's files, and as little alike."""
    for index in range(rows // ROWS_PER_UNIT):
        part = "".join(f"{index * ROWS_PER_UNIT + row:0{_BYTES_PER_FILE}x}" for row in range(ROWS_PER_UNIT))
        yield InputRange(path="photos", part=part, identity=str(index), rows=ROWS_PER_UNIT, size_bytes=100_000_000)


def _nothing(_: Path) -> dict[str, Any]:
    return {}


def _describe(totals: PlanTotals) -> dict[str, Any]:
    return {"units": totals.units, "rows": totals.rows}


def _write_listing(path: Path, rows: int) -> None:
    with path.open("w") as file:
        for index in range(rows):
            file.write(f"s3://bucket/photos/2026/{index % 997:03}/{index:012}.jpg\n")


def _apart(work: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    """Run work in a fresh process and return what it says, its seconds and its peak memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_timed, (work, path))


def _timed(work: Callable[[Path], dict[str, Any]], path: Path) -> dict[str, Any]:
    begun = time.monotonic()
    said = work(path)
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    return {"seconds": time.monotonic() - begun, "peak_mb": peak_mb, **said}


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
    """Measure listing a destination, as a run that goes on does, and verifying it by reading all of it.

    The files have the shape of results of a classifier, and are in memory, so that this measures no disk.

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


if __name__ == "__main__":
    print(json.dumps(measure_plan(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000), indent=2))
