"""How long a plan of millions of rows takes, and how much memory: listing, resuming, and a simulated hundred millions.

Each part runs in a separate process, whose peak memory is its own. Interpreter and libraries are part of that; what
they take is measured beside.
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
from typing import Any

from graphkiln_backend.scoring.plan import PlanTotals, read_plan, write_plan
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.scoring.units import InputRange

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
    from graphkiln_backend.scoring.opening import open_destination
    from graphkiln_backend.scoring.request import ScoreRequest

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


if __name__ == "__main__":
    print(json.dumps(measure_plan(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000_000), indent=2))
