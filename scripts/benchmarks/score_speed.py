"""Whole data sets: beside what they cannot be faster than, beside Ray Data, in flat memory, and by stages."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from inputs import CACHE, DIGITS, add_model, synthetic_photograph
from measurement import ratio_of, show_progress
from PIL import Image
from precision_speed import prepare
from reporting import Parts
from score_bound import BoundReport, measure_bound
from score_faults import measure_faults
from score_plan import VerifyTimes, measure_verify
from score_runs import PREPROCESS, Reading, RunReport

from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.scoring.messages import DEFAULT_ROWS_PER_UNIT
from graphkiln_backend.system.resources import usable_cores

OURS, PEER = "graphkiln score", "Ray Data"

Row = dict[str, object]
_PROGRAM = Path(__file__).resolve().parent / "score_runs.py"
_PLAN_PROGRAM = _PROGRAM.with_name("score_plan.py")
_PRECISIONS = ("fp32", "int8")
# Of whole runs: a minute of each, since what Ray Data decodes while its model loads, a few hundred images, is given to
# it: of 288 images it was worth three to six percent.
_IMAGES = {"fp32": 864, "int8": 1152}
_BOUND_SHARE = 3  # the bound needs fewer: each of its parts is one loop
_SLOW_INT8 = "this CPU has no VNNI: int8 is computed by instructions for 16 bits"
_SMALL_IMAGES = 100_000
_LISTED_ROWS = 10_000_000
_VERIFIED_UNITS = 25_000
_FAULT_RUNS, _KILLS = 10, 50
_TIMEOUT_S = 600
KEPT = CACHE / "score"  # where each part is kept as it is done
ENGINES = {"fp32": "onnxruntime", "int8": "auto"}  # in fp32 the runtime that the peer has, too
_WIDTH, _HEIGHT = 500, 375
_PHOTOGRAPHS = 64


def benchmark_score(rounds: int, seconds: float, only: str = "") -> list[Row]:
    """Every part that is done; those that are not are measured now, and each is kept as it is done.

    Args:
        rounds: That count. With one, a tenth of everything is taken.
        seconds: Unused: data sets take the time that they take.
        only: Measure this part of `PARTS`, or those whose names begin with this word, also where they are done, and no
            other.
    """
    names = [name for name in PARTS if not only or name == only or name.startswith(f"{only} ")]
    if not names:
        sys.exit(f"score has no part {only}; there are {', '.join(PARTS)}")
    parts = Parts(KEPT, rounds, seconds)
    for name in names:
        parts.measure(name, partial(PARTS[name], rounds), again=bool(only))
        show_progress("")
    return _all_rows({name: parts.read(name) for name in PARTS})


def _all_rows(measured: Mapping[str, Any]) -> list[Row]:
    """Of the parts that there are."""
    rows: list[Row] = [row for name in _PRECISIONS for row in measured[name] or ()]
    if measured["memory"]:
        rows += memory_rows(RunReport.from_json(measured["memory"]))
    rows += plan_rows(measured["plan"]) if measured["plan"] else ()
    rows += [verify_row(measured["verification"])] if measured["verification"] else ()
    faults = [part for name, part in measured.items() if name.startswith("faults") and part]
    return rows + ([fault_row(faults)] if faults else [])


def _measure_precision(precision: str, rounds: int) -> list[Row]:
    with _bench() as bench:
        return bench.compare(precision, _images(precision) // _share(rounds), rounds)


def _images(precision: str) -> int:
    return _IMAGES["fp32" if _slow(precision) else precision]


def _slow(precision: str) -> bool:
    """Return true if the CPU has no instructions for it."""
    return precision == "int8" and saturates_products_of_bytes()


def _measure_memory(rounds: int) -> dict[str, Any]:
    with _bench() as bench:
        return asdict(bench.run_small(_SMALL_IMAGES // _share(rounds)))


def _measure_plan(rounds: int) -> dict[str, Any]:
    """Use a separate program: its processes would import what this one has, torch among it, and count its memory."""
    show_progress("planning")
    command = [sys.executable, str(_PLAN_PROGRAM), str(_LISTED_ROWS // _share(rounds))]
    planned: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return planned


def _measure_verification(rounds: int) -> VerifyTimes:
    show_progress("verification")
    return measure_verify(_VERIFIED_UNITS // _share(rounds))


def _measure_faults(seed: int, rounds: int) -> dict[str, Any]:
    show_progress(f"run {seed + 1} of {_FAULT_RUNS} with faults")
    return measure_faults(seed, _KILLS // _share(rounds))


def _share(rounds: int) -> int:
    return 10 if rounds == 1 else 1


# What is measured by itself, given the rounds; what each returns can be kept as JSON.
PARTS: dict[str, Callable[[int], Any]] = {
    **{precision: partial(_measure_precision, precision) for precision in _PRECISIONS},
    "memory": _measure_memory,
    "plan": _measure_plan,
    "verification": _measure_verification,
    **{f"faults {seed + 1}": partial(_measure_faults, seed) for seed in range(_FAULT_RUNS)},
}


@contextmanager
def _bench() -> Iterator[_Bench]:
    with tempfile.TemporaryDirectory(prefix="graphkiln-score-") as folder:
        yield _Bench(Path(folder), usable_cores())


class _Bench:
    """Runs in one folder, on all cores."""

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
        note = _SLOW_INT8 if _slow(precision) else ""
        return [*bound_rows(precision, bound, note), *run_rows(precision, runs)]

    def run_small(self, images: int) -> RunReport:
        """A run over many small images."""
        show_progress(f"{images} small images")
        source = _write_small(self._folder / "small", images)
        return self.run("graphkiln", DIGITS, source, 1, self._cores, rows=DEFAULT_ROWS_PER_UNIT)

    def run(self, program: str, model: Path, source: Path, workers: int, cores: int, *, rows: int = 48) -> RunReport:
        """One run in a separate process."""
        destination = self._folder / f"answers {next(self._destinations)}"
        arguments = [program, model, source, destination, self._cache, workers, cores, rows]
        command = [sys.executable, _PROGRAM, *arguments]
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        if done.returncode:
            sys.exit(f"{program} failed: {done.stderr[-3000:]}")
        return RunReport.from_json(json.loads(done.stdout.splitlines()[-1]))


def _write_small(folder: Path, images: int) -> Path:
    """Images of digits' size, a thousand to a folder."""
    random = np.random.default_rng(0)
    for number in range(images):
        part = folder / f"{number // 1000:04}"
        if number % 1000 == 0:
            part.mkdir(parents=True)
        Image.fromarray(random.integers(0, 256, (8, 8), np.uint8)).save(part / f"{number:07}.png")
    return folder


def add_resnet(store: Path, precision: str) -> Path:
    """Add ResNet-50 with random weights to a store, in `fp32` or `int8`; return the model's folder."""
    graphs = prepare("resnet50")
    graph = graphs.int8 if precision == "int8" else graphs.fp32
    if graph is None:
        raise SystemExit("ResNet-50 cannot be quantized here")
    said = {"preprocess": PREPROCESS.to_json(), "engine": ENGINES[precision]}
    parameters = "".join(
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}\n' for key, value in said.items()
    )
    name = f"resnet50_{precision}"
    add_model(store, name, graph, f"\n{parameters}")
    return store / name


def write_photographs(folder: Path, count: int, size: tuple[int, int] = (_WIDTH, _HEIGHT)) -> Path:
    """Write a folder of JPEG files: a few photographs, copied as often as needed."""
    contents = [synthetic_photograph(*size, seed) for seed in range(_PHOTOGRAPHS)]
    folder.mkdir(parents=True)
    for number in range(count):
        # Ray Data takes files of one content for one file no more than we do; a trailer makes each another one.
        (folder / f"{number:07}.jpg").write_bytes(contents[number % len(contents)] + number.to_bytes(8, "big"))
    return folder


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
