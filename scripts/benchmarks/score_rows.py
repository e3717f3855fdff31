"""The rows of the table on scoring, from what was measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from measurement import ratio_of
from score_bound import BoundReport
from score_runs import Reading, RunReport
from score_verify import VerifyTimes

from graphkiln_backend.scoring.request import DEFAULT_ROWS_PER_UNIT

OURS, PEER = "graphkiln score", "Ray Data"

Row = dict[str, object]


def bound_rows(precision: str, report: BoundReport, note: str = "") -> list[Row]:
    """What the scorer reaches of its bound, by elapsed and by processor time; a note says what slows both."""
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
            note=note,
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


def fault_row(runs: Sequence[Mapping[str, Any]]) -> Row:
    """What was lost, or there twice, after random kills."""
    kills = sum((Counter(run["kills"]) for run in runs), Counter[str]())
    rows, lost, twice = (sum(run[name] for run in runs) for name in ("rows", "lost", "twice"))
    killed = ", ".join(f"{count} {name}" for name, count in sorted(kills.items()))
    return _row(
        f"digits, three nodes, {len(runs)} runs, killed: {killed}",
        per_second=rows / sum(run["seconds"] for run in runs),
        note=f"{lost} lost, {twice} twice of {rows}",
    )


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
