"""Programs of `scripts/benchmark score`: separate processes, so that time and memory are measured for each alone.

    python score_runs.py NAME ARGUMENTS    arguments as a JSON object; prints its result as JSON in its last line

The time of a whole run counts from the first image that a model gets until everything is written: starting Ray and
loading models take as long for ten images as for a million. What Ray Data reads before its model is loaded is not
counted.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pyarrow as pa
import score_peers

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination, encode_result, object_name
from graphkiln_backend.scoring.messages import InputRange, ScoreRequest, StageTimes, Unit, UnitCommitted
from graphkiln_backend.scoring.plan import open_destination, read_plan, write_plan
from graphkiln_backend.scoring.sources.base import Columns
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.scoring.verify import verify

# On a CPU without VNNI, ONNX Runtime is faster in int8 without this setting, and up to 45% of a signal is wrong.
EXACT_PRODUCTS = ("session.x64quantprecision", "1")
_SAMPLE_S = 0.5
_WORKER = "graphkiln_backend.scoring.worker_process"
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - tempfile makes a folder in it
_ROWS_PER_UNIT = 1000
_CLASSES = 5
_BYTES_PER_FILE = 60  # what a file of a folder takes in a plan: its name, size and time


def run_apart(name: str, **arguments: Any) -> dict[str, Any]:
    """Run one of `PROGRAMS`, or a peer, in a new process.

    Returns:
        Its result; that of a program has `peak_mb`, its largest resident memory.

    Raises:
        MeasurementError: It failed.
    """
    program = score_peers.__file__ if name in score_peers.PEERS else __file__
    command = [sys.executable, program, name, json.dumps(arguments, default=str)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    if done.returncode:
        raise MeasurementError(f"{name} failed: {done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def request_for(model: Path | str, source: Path | str, destination: Path | str, **options: Any) -> ScoreRequest:
    """Make the request of a run over a folder of images."""
    return ScoreRequest(
        source=str(source),
        model=Path(model),
        destination=str(destination),
        backends=frozenset({"graphkiln"}),
        **options,
    )


def score(
    *, model: str, source: str, destination: str, cache: str, workers: int, cores: int, rows_per_unit: int
) -> dict[str, Any]:
    """Score a folder of images with graphkiln.

    Returns:
        `rows`; `seconds`; seconds of all units by stage in `stages`; `readings` of memory, each with the `rows` done
        so far, and `worker_mb` and `driver_mb`, the resident memory of the largest worker and of the driver.
    """
    from graphkiln_backend.scoring.driver import score_data_set

    starts: list[float] = []
    times: list[StageTimes] = []
    rows = [0]

    def note(event: object) -> None:
        if isinstance(event, UnitCommitted):
            starts.append(time.monotonic() - event.report.seconds)
            times.append(event.report.times)
            rows[0] += event.report.rows

    request = request_for(
        model,
        source,
        destination,
        cache=Path(cache),
        workers=workers,
        cores_per_worker=cores,
        rows_per_unit=rows_per_unit,
    )
    with _memory_sampled(lambda: rows[0]) as readings:
        score_data_set(request, note)
        seconds = time.monotonic() - min(starts)
    stages = asdict(reduce(add, times, StageTimes()))
    return {"rows": rows[0], "seconds": seconds, "stages": stages, "readings": readings}


@contextmanager
def _memory_sampled(rows: Callable[[], int]) -> Iterator[list[dict[str, float]]]:
    """Read the memory of this process and of its workers while the block runs."""
    readings: list[dict[str, float]] = []
    ended = threading.Event()
    own = psutil.Process()

    def watch() -> None:
        while not ended.wait(_SAMPLE_S):
            try:
                workers = [each for each in own.children(recursive=True) if _WORKER in " ".join(each.cmdline())]
                largest = max((each.memory_info().rss for each in workers), default=0)
            except psutil.Error:
                continue  # a process has just ended
            if largest:
                mb = {"worker_mb": largest / 2**20, "driver_mb": own.memory_info().rss / 2**20}
                readings.append({"rows": rows(), **mb})

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()


def score_for_faults(source: str, model: str, destination: str, address: str, rows_per_unit: int) -> dict[str, Any]:
    """Score on a running cluster, and print a line for each unit that is committed."""
    from graphkiln_backend.scoring.driver import score_data_set

    options = {"cores_per_worker": 1, "address": address, "rows_per_unit": rows_per_unit}
    score_data_set(
        request_for(model, source, destination, **options),
        lambda event: print("committed", flush=True) if isinstance(event, UnitCommitted) else None,
    )
    return {}


def plan_listing(rows: int) -> dict[str, Any]:
    """Plan a listing of files; return `units`, `rows` and `seconds`."""
    with tempfile.TemporaryDirectory(prefix="graphkiln-plan-") as folder:
        listing = Path(folder) / "listing.txt"
        with listing.open("w") as file:
            file.writelines(f"s3://bucket/photos/2026/{index % 997:03}/{index:012}.jpg\n" for index in range(rows))
        begun = time.monotonic()
        ranges = FileSource(str(listing), Columns()).ranges(_ROWS_PER_UNIT)
        totals = write_plan(Path(folder) / "plan.parquet", ranges, "configuration")
        return {"units": totals.units, "rows": totals.rows, "seconds": time.monotonic() - begun}


def plan_simulated(rows: int) -> dict[str, Any]:
    """Write and read a plan of ranges without a listing; return `units`, `rows` and `seconds`."""
    with tempfile.TemporaryDirectory(prefix="graphkiln-plan-") as folder:
        plan = Path(folder) / "plan.parquet"
        begun = time.monotonic()
        totals = write_plan(plan, _simulated_ranges(rows), "configuration")
        if sum(unit.rows for unit in read_plan(plan)) != rows:
            raise MeasurementError(f"the plan does not have the {rows} rows that were written")
        return {"units": totals.units, "rows": totals.rows, "seconds": time.monotonic() - begun}


def resume(units: int) -> dict[str, Any]:
    """List finished units, a file each, and leave them out of a plan; return `units`, `open` and `seconds`."""
    with tempfile.TemporaryDirectory(prefix="graphkiln-plan-") as folder:
        plan, results = Path(folder) / "plan.parquet", Path(folder) / "results"
        results.mkdir()
        write_plan(plan, _simulated_ranges(units * _ROWS_PER_UNIT), "configuration")
        for unit in read_plan(plan):
            (results / f"{unit.id}.parquet").touch()
        begun = time.monotonic()
        destination = open_destination(ScoreRequest(source="", model="", destination=str(results)))
        committed = set(destination.committed_ids())
        left = sum(unit.id not in committed for unit in read_plan(plan))
        return {"units": len(committed), "open": left, "seconds": time.monotonic() - begun}


def _simulated_ranges(rows: int) -> Iterator[InputRange]:
    """Ranges whose parts are as long as those of a folder's files, and as different."""
    for index in range(rows // _ROWS_PER_UNIT):
        part = "".join(f"{index * _ROWS_PER_UNIT + row:0{_BYTES_PER_FILE}x}" for row in range(_ROWS_PER_UNIT))
        yield InputRange(path="photos", part=part, identity=str(index), rows=_ROWS_PER_UNIT, size_bytes=100_000_000)


def verification(units: int) -> dict[str, Any]:
    """List a destination, as a resumed run does, and verify it by reading all of it.

    The files have the shape of a classifier's results and are in memory, so that no disk is measured.

    Returns:
        `units`, `rows`, `list_s`, `verify_s`, `verify_cpu_s` (processor time), and `grown_mb`, the growth of this
        process's largest memory.
    """
    with tempfile.TemporaryDirectory(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as folder:
        destination = ParquetDestination(FolderStore(Path(folder)))
        planned = list(_write_results(Path(folder), units))
        begun = time.perf_counter()
        committed = set(destination.committed_ids())
        listed, cpu, before_mb = time.perf_counter(), time.process_time(), _peak_mb()
        found = verify(destination, planned)
        ended, cpu = time.perf_counter(), time.process_time() - cpu
    if len(committed) != units or not found.ok:
        raise MeasurementError(f"{units} units were written, {len(committed)} were found: {found.findings[:3]}")
    return {
        "units": units,
        "rows": found.inputs,
        "list_s": listed - begun,
        "verify_s": ended - listed,
        "verify_cpu_s": cpu,
        "grown_mb": _peak_mb() - before_mb,
    }


def _write_results(folder: Path, units: int) -> Iterator[Unit]:
    """Write results as they are committed; they differ in their ids."""
    rows, random = _ROWS_PER_UNIT, np.random.default_rng(0)
    ends = pa.array(np.arange(rows + 1, dtype=np.int32) * _CLASSES)
    classes = random.integers(0, 1000, rows * _CLASSES, np.int32)
    labels = pa.array(np.char.add("class ", classes.astype(str)))
    scores = random.random(rows * _CLASSES, np.float32)
    answers = pa.table(
        {
            "indices": pa.ListArray.from_arrays(ends, pa.array(classes)),
            "labels": pa.ListArray.from_arrays(ends, labels),
            "scores": pa.ListArray.from_arrays(ends, pa.array(scores)),
            "error": pa.array(["not an image" if index == 7 else None for index in range(rows)], pa.string()),
        }
    )
    for number in range(units):
        path = f"photos/{number:08}"
        unit = InputRange(path=path, part="", identity=str(number), rows=rows).unit("model")
        table = answers.add_column(0, "id", pa.array([f"{path}/{index:06}.jpg" for index in range(rows)]))
        result = Result(unit_id=unit.id, configuration="model", table=table)
        (folder / object_name(unit.id)).write_bytes(encode_result(result, str(number)))
        yield unit


def _peak_mb() -> float:
    """Largest resident memory of this process; `ru_maxrss` would include that of its parent."""
    status = Path("/proc/self/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")) / 1024


PROGRAMS: dict[str, Callable[..., dict[str, Any]]] = {
    "score": score,
    "score-for-faults": score_for_faults,
    "plan-listing": plan_listing,
    "plan-simulated": plan_simulated,
    "resume": resume,
    "verification": verification,
}

if __name__ == "__main__":
    result = PROGRAMS[sys.argv[1]](**json.loads(sys.argv[2]))
    print(f"\n{json.dumps({**result, 'peak_mb': _peak_mb()})}", flush=True)
