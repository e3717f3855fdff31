"""Whole data sets: beside what they cannot be faster than, beside Ray Data, in flat memory, and by stages."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from measurement import ratio_of, show_progress
from PIL import Image
from precision_models import prepare
from score_bound import BoundReport, measure_bound
from score_faults import measure_faults
from score_models import add_resnet, write_photographs
from score_runs import Reading, RunReport
from score_verify import VerifyTimes, measure_verify
from stores import DIGITS

from graphkiln_backend.graph.cores import usable_cores
from graphkiln_backend.scoring.request import DEFAULT_ROWS_PER_UNIT

_PROGRAM = Path(__file__).resolve().parent / "score_runs.py"
_PLAN_PROGRAM = _PROGRAM.with_name("score_plan.py")
_PRECISIONS = ("fp32", "int8")
_IMAGES = {"fp32": 288, "int8": 1152}
"""Of whole runs: ten seconds of each."""
_BOUND_SHARE = 3
"""The bound needs fewer: each of its parts is one loop."""
_SMALL_IMAGES = 100_000
_LISTED_ROWS = 10_000_000
_VERIFIED_UNITS = 25_000
_KILLS = 10
_TIMEOUT_S = 600
OURS, PEER = "graphkiln score", "Ray Data"

Row = dict[str, object]


def benchmark_score(rounds: int, _: float) -> list[Row]:
    """Everything about scoring; one round measures a small part of it.

    Args:
        rounds: That count. With one, a tenth of the images is taken.
        _: Unused: data sets take the time that they take.
    """
    share = 10 if rounds == 1 else 1
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="graphkiln-score-") as folder:
        bench = _Bench(Path(folder), usable_cores())
        for precision in _PRECISIONS:
            rows += bench.compare(precision, _IMAGES[precision] // share, rounds)
        small = bench.run_small(_SMALL_IMAGES // share)
    rows += memory_rows(small)
    rows += scaling_rows(rows, small.driver_unit_s)
    if rounds > 1:
        show_progress("planning")
        rows += plan_rows(_measure_plan(_LISTED_ROWS))
        show_progress("verification")
        rows.append(verify_row(measure_verify(_VERIFIED_UNITS)))
        show_progress("faults")
        rows.append(fault_row(measure_faults(1, _KILLS)))
    show_progress("")
    return rows


def _measure_plan(rows: int) -> dict[str, Any]:
    """In a program of its own: its processes would import what this one has, torch among it, and count its memory."""
    command = [sys.executable, str(_PLAN_PROGRAM), str(rows)]
    planned: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return planned


class _Bench:
    """Runs in one folder, on all cores.

    Args:
        folder: Temporary.
        cores: How many.
    """

    def __init__(self, folder: Path, cores: int) -> None:
        self._folder, self._cores = folder, cores
        self._cache = folder / "cache"
        self._cache.mkdir()
        self._destinations = count()

    def compare(self, precision: str, images: int, rounds: int) -> list[Row]:
        """The bound, one worker, one worker per core, and the peer, in turn."""
        model = add_resnet(self._folder / "store", precision)
        photographs = write_photographs(self._folder / f"photographs {precision}", images)
        few = write_photographs(self._folder / f"few {precision}", max(32, images // _BOUND_SHARE))
        graphs = prepare("resnet50")
        set_ups = {
            f"{OURS}, 1 worker": ("graphkiln", model, 1, self._cores),
            f"{OURS}, {self._cores} workers": ("graphkiln", model, self._cores, 1),
            PEER: ("ray-data", graphs.int8 if precision == "int8" else graphs.fp32, 1, self._cores),
        }
        bound = measure_bound(model, few, self._cache, self._cores, rounds)
        runs: dict[str, list[RunReport]] = {name: [] for name in set_ups}
        for number in range(rounds):
            for name, (program, graph, workers, cores) in set_ups.items():
                show_progress(f"{precision}, round {number + 1}/{rounds}: {name}")
                runs[name].append(self.run(program, Path(str(graph)), photographs, workers, cores))
        return [*bound_rows(precision, bound), *run_rows(precision, runs)]

    def run_small(self, images: int) -> RunReport:
        """A run over many small images."""
        show_progress(f"{images} small images")
        source = _write_small(self._folder / "small", images)
        return self.run("graphkiln", DIGITS, source, 1, self._cores, rows=DEFAULT_ROWS_PER_UNIT)

    def run(self, program: str, model: Path, source: Path, workers: int, cores: int, *, rows: int = 48) -> RunReport:
        """One run in a process of its own."""
        destination = self._folder / f"answers {next(self._destinations)}"
        arguments = [program, model, source, destination, self._cache, workers, cores, rows]
        command = [sys.executable, _PROGRAM, *arguments]
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            sys.exit(f"{program} failed: {done.stderr[-3000:]}")
        found = json.loads(done.stdout.splitlines()[-1])
        found["readings"] = [Reading(**reading) for reading in found["readings"]]
        return RunReport(**found)


def bound_rows(precision: str, report: BoundReport) -> list[Row]:
    """What the scorer reaches of its bound, by elapsed and by processor time."""
    rounds = report.rounds
    ours = [one.scorer for one in rounds]
    bounds = [one.bound for one in rounds]
    elapsed = ratio_of([1 / one.elapsed_s for one in ours], [1 / one.elapsed_s for one in bounds])
    cpu = ratio_of([1 / one.cpu_s for one in ours], [1 / one.cpu_s for one in bounds])
    title = f"{precision}, {report.session}, batches of {report.batch_size}"
    return [
        _row(
            f"{title}: decoding, then the session, alone",
            per_second=1 / median([one.elapsed_s for one in bounds]),
            cpu_ms=1e3 * median([one.cpu_s for one in bounds]),
        ),
        _row(
            f"{title}: both at once, by a worker's scorer",
            per_second=1 / median([one.elapsed_s for one in ours]),
            ratio=elapsed.median,
            spread=elapsed.spread,
            cpu_ms=1e3 * median([one.cpu_s for one in ours]),
            cpu_ratio=cpu.median,
        ),
    ]


def run_rows(precision: str, runs: Mapping[str, Sequence[RunReport]]) -> list[Row]:
    """Whole runs beside the peer, and where the time of ours goes."""
    peer = [run.per_second for run in runs[PEER]]
    rows = []
    for name, found in runs.items():
        rates = [run.per_second for run in found]
        ratio = ratio_of(rates, peer)
        rows.append(
            _row(
                f"{precision}, {name}",
                per_second=median(rates),
                ratio=ratio.median,
                spread=ratio.spread,
                note=stages_of(found[-1]),
            )
        )
    return rows


def stages_of(run: RunReport) -> str:
    """Milliseconds of an image in each stage, in words; empty for the peer."""
    return ", ".join(f"{name.removesuffix('_s')} {1e3 * s / run.rows:.2f} ms" for name, s in run.stages.items())


def memory_rows(report: RunReport) -> list[Row]:
    """Memory after a tenth of the rows, after half, and at the end; the ratio is to the first."""
    rows = []
    first = reading_at(report.readings, report.rows // 10)
    for done in (report.rows // 10, report.rows // 2, report.rows):
        reading = reading_at(report.readings, done)
        rows.append(
            _row(
                f"digits, {OURS}: memory after {done} rows",
                per_second=report.per_second,
                ratio=round((reading.worker_mb + reading.driver_mb) / (first.worker_mb + first.driver_mb), 3),
                note=f"worker {reading.worker_mb:.0f} MB, driver {reading.driver_mb:.0f} MB",
            )
        )
    return rows


def scaling_rows(rows: Sequence[Row], driver_unit_s: float) -> list[Row]:
    """On paper: how many workers one driver keeps busy, and what they reach together.

    Workers share nothing but the driver and the stores: the former's processor time for a unit is measured, the latter
    are whoever's who runs them.

    Args:
        rows: Of whole runs with one worker.
        driver_unit_s: Processor time of the driver for a unit.
    """
    found = []
    for row in rows:
        if str(row["row"]).endswith(f"{OURS}, 1 worker"):
            rate = float(str(row["rows/s"]))
            workers = int(DEFAULT_ROWS_PER_UNIT / rate / driver_unit_s)
            title = f"{row['row']}: on paper, {workers} workers that one driver keeps busy"
            note = f"driver: {1e3 * driver_unit_s:.2f} ms for a unit of {DEFAULT_ROWS_PER_UNIT} rows"
            found.append(_row(title, per_second=workers * rate, note=note))
    return found


def plan_rows(measured: Mapping[str, Any]) -> list[Row]:
    """Planning, resuming, and a plan of a hundred million rows."""
    rows = []
    for name in ("listing", "simulated"):
        part = measured[name]
        title = f"plan of {part['rows']} rows, {name}"
        note = f"{part['units']} units, {part['seconds']:.1f} s, peak {part['peak_mb']:.0f} MB"
        rows.append(_row(title, per_second=part["rows"] / part["seconds"], note=note))
    resumed = measured["resume"]
    note = f"{resumed['seconds']:.2f} s, {resumed['open']} left to do"
    title = f"resume of {resumed['units']} finished units"
    rows.append(_row(title, per_second=resumed["units"] * DEFAULT_ROWS_PER_UNIT / resumed["seconds"], note=note))
    return rows


def verify_row(measured: VerifyTimes) -> Row:
    """Verification of a finished destination."""
    title = f"verification of {measured['units']} units, {measured['rows']} rows"
    per_second = measured["rows"] / measured["verify_s"]
    note = (
        f"{measured['verify_s']:.1f} s, processor time {measured['verify_cpu_s']:.1f} s, listing "
        f"{measured['list_s']:.1f} s, memory grew by {measured['grown_mb']:.0f} MB"
    )
    return _row(title, per_second=per_second, note=note)


def fault_row(measured: Mapping[str, Any]) -> Row:
    """What was lost, or there twice, after random kills."""
    kills = ", ".join(f"{count} {name}" for name, count in measured["kills"].items())
    lost = f"{measured['lost']} lost, {measured['twice']} twice"
    per_second = measured["rows"] / sum(measured["seconds"])
    return _row(f"digits, three nodes, killed: {kills}", per_second=per_second, note=f"{lost} of {measured['rows']}")


def reading_at(readings: Sequence[Reading], rows: int) -> Reading:
    """The first reading by which so many rows were done, or else the last."""
    return next((reading for reading in readings if reading.rows >= rows), readings[-1])


def _row(
    name: str,
    *,
    per_second: float,
    ratio: float | str = "-",
    spread: float | str = "-",
    cpu_ms: float | None = None,
    cpu_ratio: float | str = "-",
    note: str = "",
) -> Row:
    return {
        "row": name,
        "rows/s": round(per_second, 1),
        "ratio": ratio,
        "spread": spread,
        "CPU ms": "-" if cpu_ms is None else round(cpu_ms, 2),
        "CPU ratio": cpu_ratio,
        "note": note,
    }


def _write_small(folder: Path, images: int) -> Path:
    """Images of digits' size, a thousand to a folder."""
    random = np.random.default_rng(0)
    for number in range(images):
        part = folder / f"{number // 1000:04}"
        if number % 1000 == 0:
            part.mkdir(parents=True)
        Image.fromarray(random.integers(0, 256, (8, 8), np.uint8)).save(part / f"{number:07}.png")
    return folder
