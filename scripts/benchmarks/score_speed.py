"""Whole data sets: beside what they cannot be faster than, beside Ray Data, in flat memory, and by stages."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from inputs import CACHE, DIGITS
from measurement import show_progress
from PIL import Image
from precision_speed import prepare
from reporting import Parts
from score_bound import measure_bound
from score_faults import measure_faults
from score_models import add_resnet, write_photographs
from score_rows import (
    OURS,
    PEER,
    Row,
    bound_rows,
    fault_row,
    memory_rows,
    plan_rows,
    run_rows,
    scaling_rows,
    verify_row,
)
from score_runs import RunReport
from score_verify import VerifyTimes, measure_verify

from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.scoring.request import DEFAULT_ROWS_PER_UNIT
from graphkiln_backend.system.resources import usable_cores

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
        small = RunReport.from_json(measured["memory"])
        rows += memory_rows(small) + scaling_rows(rows, small.driver_unit_s)
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
