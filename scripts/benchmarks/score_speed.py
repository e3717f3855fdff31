"""Score whole data sets: beside decoding and session alone, beside Ray Data; memory, plans, verification, faults.

Each part is saved when it is measured, and an interrupted benchmark continues with the next part.
"""

from __future__ import annotations

import io
import json
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import pyarrow.parquet as pq
import score_runs
from inputs import CACHE, DIGITS, add_model, parameters, synthetic_photograph
from measurement import ratio_of, show_progress, take_turns
from PIL import Image
from precision_speed import prepare
from ray_cluster import processes_of, ray_nodes
from reporting import Parts
from score_peers import PREPROCESS
from score_runs import EXACT_PRODUCTS, request_for, run_apart

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.scoring.messages import DEFAULT_ROWS_PER_UNIT
from graphkiln_backend.scoring.messages import Row as DataRow
from graphkiln_backend.scoring.model import read_model
from graphkiln_backend.system.resources import usable_cores

OURS, PEER = "graphkiln score", "Ray Data"
KEPT = CACHE / "score"
Row = dict[str, object]

_PRECISIONS = ("fp32", "int8")
_ENGINES = {"fp32": "onnxruntime", "int8": "auto"}  # in fp32 the runtime that the peer has, too
# A minute for each whole run, because the few hundred images that Ray Data decodes while its model loads are not
# counted: of 288 images they were three to six percent.
_IMAGES = {"fp32": 864, "int8": 1152}
_ALONE_SHARE = 3  # the parts alone need fewer images: each is one loop
_PHOTOGRAPHS = 64  # different ones
_ROWS_PER_UNIT = 48  # few, so that the last units of a short run are not most of it
_SMALL_IMAGES = 100_000
_LISTED_ROWS, _SIMULATED_ROWS, _RESUMED_UNITS = 10_000_000, 100_000_000, 25_000
_VERIFIED_UNITS = 25_000

_FAULT_RUNS, _KILLS = 10, 50
_FAULT_UNITS, _FAULT_ROWS_PER_UNIT, _NODES = 200, 10, 3
_KINDS = {"worker": 7, "node": 2, "driver": 1}  # how often each is chosen
_LONGEST_RUN_S = 1800.0


def benchmark_score(rounds: int, seconds: float, only: str = "") -> list[Row]:
    """Measure all parts that are not saved, and return the rows of all saved parts.

    Args:
        rounds: Measured rounds. With one, each part measures a tenth of its data.
        seconds: Not used; data sets take the time that they take.
        only: Measure this part again, or those whose names begin with this word, and no other.
    """
    names = [name for name in PARTS if not only or name == only or name.startswith(f"{only} ")]
    if not names:
        sys.exit(f"score has no part {only}; there are {', '.join(PARTS)}")
    parts = Parts(KEPT, rounds, seconds)
    for name in names:
        parts.measure(name, partial(PARTS[name], rounds), again=bool(only))
        show_progress("")
    measured = {name: parts.read(name) for name in PARTS}
    faults = [part for name, part in measured.items() if name.startswith("faults") and part]
    return [
        *(row for precision in _PRECISIONS for row in measured[precision] or ()),
        *(memory_rows(measured["memory"]) if measured["memory"] else ()),
        *(plan_rows(measured["plan"]) if measured["plan"] else ()),
        *([verification_row(measured["verification"])] if measured["verification"] else ()),
        *([fault_row(faults)] if faults else ()),
    ]


def _row(
    name: str,
    per_second: float,
    *,
    ratio: float | str = "-",
    spread: float | str = "-",
    cpu_ms: float | str = "-",
    cpu_ratio: float | str = "-",
    note: str = "",
) -> Row:
    columns = {"row": name, "rows/s": round(per_second, 1), "ratio": ratio, "spread": spread}
    return {**columns, "CPU ms": cpu_ms, "CPU ratio": cpu_ratio, "note": note}


def _share(rounds: int) -> int:
    return 10 if rounds == 1 else 1


# Photographs to top-5 by ResNet-50: decoding and session alone, whole runs, and Ray Data.


def _measure_precision(precision: str, rounds: int) -> list[Row]:
    is_slow = precision == "int8" and saturates_products_of_bytes()  # no instructions for it
    images, cores = _IMAGES["fp32" if is_slow else precision] // _share(rounds), usable_cores()
    with tempfile.TemporaryDirectory(prefix="graphkiln-score-") as name:
        folder = Path(name)
        graphs = prepare("resnet50")
        graph = graphs.int8 if precision == "int8" else graphs.fp32
        if graph is None:
            raise LoweringError("ResNet-50 cannot be quantized here", attempts=())
        model = folder / "store" / f"resnet50_{precision}"
        settings = {"preprocess": PREPROCESS.to_json(), "engine": _ENGINES[precision]}
        add_model(model.parent, model.name, graph, f"\n{parameters(settings)}")
        photographs = write_photographs(folder / "photographs", images)
        few = write_photographs(folder / "few", max(32, images // _ALONE_SHARE))
        cache = folder / "cache"
        cache.mkdir()

        title, costs = _measure_parts(model, few, cache, cores, rounds)

        def run(set_up: str, workers: int, _: float) -> dict[str, Any]:
            common = {"source": photographs, "destination": tempfile.mkdtemp(dir=folder)}
            if set_up == PEER:
                exact = dict([EXACT_PRODUCTS]) if saturates_products_of_bytes() else {}
                return {"rows": images, **run_apart("ray-data", graph=graph, cores=cores, settings=exact, **common)}
            options = {"workers": workers, "cores": cores // workers, "rows_per_unit": _ROWS_PER_UNIT}
            return run_apart("score", model=model, cache=cache, **options, **common)

        runs = {f"{OURS}, {count} worker{'s' if count > 1 else ''}": partial(run, OURS, count) for count in (1, cores)}
        found = take_turns(f"{precision}, ", {**runs, PEER: partial(run, PEER, 1)}, rounds, 0.0, warm_up=False)
    note = "this CPU has no VNNI: int8 is computed by instructions for 16 bits" if is_slow else ""
    return [*bound_rows(f"{precision}, {title}", costs, note), *run_rows(precision, found)]


def write_photographs(folder: Path, count: int) -> Path:
    """Write a folder of JPEG files, 500 x 375: a few photographs, copied as often as needed."""
    contents = [synthetic_photograph(500, 375, seed) for seed in range(_PHOTOGRAPHS)]
    folder.mkdir(parents=True)
    for number in range(count):
        # A trailer makes the content of each file unique: Ray Data and graphkiln would take equal files for one.
        (folder / f"{number:07}.jpg").write_bytes(contents[number % len(contents)] + number.to_bytes(8, "big"))
    return folder


Cost = tuple[float, float]  # elapsed and processor time of an image, in seconds


def _measure_parts(
    model: Path, photographs: Path, cache: Path, cores: int, rounds: int
) -> tuple[str, dict[str, list[Cost]]]:
    """Measure decoding and the session, each alone on all cores, and a worker's scorer, which does both at once.

    The sum of the first two is the necessary work of an image. Elapsed time shows how well the scorer overlaps them,
    processor time what they cost: it hardly depends on what else the machine does.

    Returns:
        The session and batch size, and the costs of `decode`, `session` and `scorer`, round by round.
    """
    request = request_for(model, photographs, photographs, cache=cache, cores_per_worker=cores, rows_per_unit=1)
    files = sorted(photographs.iterdir())
    with ArtifactCache(cache) as artifacts:
        chosen = read_model(request, artifacts, cores)
        proven = chosen.deployment.build(artifacts)
        with proven.session, chosen.scorer(proven, request, cores, artifacts) as scorer:
            (spec,) = proven.session.signature.inputs
            size = scorer.batch_size
            batch: dict[str, AnyArray] = {spec.name: np.random.default_rng(0).random((size, 3, 224, 224), np.float32)}

            def decode_part(paths: Sequence[Path]) -> None:
                for path in paths:
                    load_sample(path.read_bytes(), PREPROCESS)

            def decode() -> None:
                with ThreadPoolExecutor(cores) as pool:
                    list(pool.map(decode_part, [files[number::cores] for number in range(cores)]))

            def compute() -> None:
                for _ in range(len(files) // size):
                    proven.session.run(batch)

            def score() -> None:
                rows = [DataRow(id=path.name, load=path.read_bytes) for path in files]
                with ThreadPoolExecutor(2) as pool:  # units scored at a time by a worker
                    list(pool.map(scorer.answer, [rows[::2], rows[1::2]]))

            def measure(part: Callable[[], None], _: float) -> Cost:
                elapsed, cpu = time.perf_counter(), time.process_time()
                part()
                elapsed, cpu = time.perf_counter() - elapsed, time.process_time() - cpu
                return elapsed / len(files), cpu / len(files)

            parts = {"decode": decode, "session": compute, "scorer": score}
            costs = take_turns(
                f"{model.name}, ", {name: partial(measure, part) for name, part in parts.items()}, rounds, 0.0
            )
            return f"{proven.config}, batches of {size}", costs


def bound_rows(title: str, costs: Mapping[str, Sequence[Cost]], note: str = "") -> list[Row]:
    """Compare a scorer with its parts alone; the note explains what slows both."""
    scorer = costs["scorer"]
    bound = [
        (one[0] + other[0], one[1] + other[1]) for one, other in zip(costs["decode"], costs["session"], strict=True)
    ]
    elapsed = ratio_of([1 / elapsed for elapsed, _ in scorer], [1 / elapsed for elapsed, _ in bound])
    cpu = ratio_of([1 / cpu for _, cpu in scorer], [1 / cpu for _, cpu in bound])

    def per_second(costs: Sequence[Cost]) -> float:
        return 1 / median(elapsed for elapsed, _ in costs)

    def cpu_ms(costs: Sequence[Cost]) -> float:
        return round(1e3 * median(cpu for _, cpu in costs), 2)

    return [
        _row(f"{title}: decoding, then the session, alone", per_second(bound), cpu_ms=cpu_ms(bound), note=note),
        _row(
            f"{title}: both at once, by a worker's scorer",
            per_second(scorer),
            ratio=elapsed.median,
            spread=elapsed.spread,
            cpu_ms=cpu_ms(scorer),
            cpu_ratio=cpu.median,
        ),
    ]


def run_rows(precision: str, runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Row]:
    """Compare whole runs with the peer, round by round; the note has milliseconds of an image by stage."""
    rates = {name: [run["rows"] / run["seconds"] for run in found] for name, found in runs.items()}
    rows = []
    for name, found in runs.items():
        ratio, last = ratio_of(rates[name], rates[PEER]), found[-1]
        stages = last.get("stages", {}).items()
        note = ", ".join(f"{stage.removesuffix('_s')} {1e3 * s / last['rows']:.2f} ms" for stage, s in stages)
        rows.append(
            _row(f"{precision}, {name}", median(rates[name]), ratio=ratio.median, spread=ratio.spread, note=note)
        )
    return rows


# Memory over a run of many small images.


def _measure_memory(rounds: int) -> dict[str, Any]:
    images = _SMALL_IMAGES // _share(rounds)
    show_progress(f"{images} small images")
    with tempfile.TemporaryDirectory(prefix="graphkiln-score-") as name:
        folder = Path(name)
        (folder / "cache").mkdir()
        for start in range(0, images, 1000):
            _write_digits(folder / "small" / f"{start // 1000:04}", range(start, start + 1000))
        return run_apart(
            "score",
            model=DIGITS,
            source=folder / "small",
            destination=folder / "answers",
            cache=folder / "cache",
            workers=1,
            cores=usable_cores(),
            rows_per_unit=DEFAULT_ROWS_PER_UNIT,
        )


def _write_digits(folder: Path, numbers: range) -> Path:
    """Write images of the digits' size, one for each number."""
    folder.mkdir(parents=True)
    for number in numbers:
        content = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)).save(content, "png")
        (folder / f"{number:07}.png").write_bytes(content.getvalue())
    return folder


def memory_rows(run: Mapping[str, Any]) -> list[Row]:
    """Memory after a tenth of the rows, after half, and at the end; the ratio is to the first."""
    rows, base_mb = [], 0.0
    for done in (run["rows"] // 10, run["rows"] // 2, run["rows"]):
        readings = [reading for reading in run["readings"] if reading["rows"] >= done] or run["readings"][-1:]
        worker_mb, driver_mb = readings[0]["worker_mb"], readings[0]["driver_mb"]
        base_mb = base_mb or worker_mb + driver_mb
        ratio = round((worker_mb + driver_mb) / base_mb, 3)
        note = f"worker {worker_mb:.0f} MB, driver {driver_mb:.0f} MB"
        title = f"digits, {OURS}: memory after {done} rows"
        rows.append(_row(title, run["rows"] / run["seconds"], ratio=ratio, note=note))
    return rows


# Plans of millions of rows, resuming, and verification.


def _measure_plan(rounds: int) -> dict[str, Any]:
    show_progress("planning")
    return {
        "listing": run_apart("plan-listing", rows=_LISTED_ROWS // _share(rounds)),
        "resume": run_apart("resume", units=_RESUMED_UNITS // _share(rounds)),
        "simulated": run_apart("plan-simulated", rows=_SIMULATED_ROWS // _share(rounds)),
    }


def plan_rows(measured: Mapping[str, Any]) -> list[Row]:
    """Rows of planning a listing and a hundred million simulated rows, and of resuming."""
    rows = []
    for name in ("listing", "simulated"):
        part = measured[name]
        note = f"{part['units']} units, {part['seconds']:.1f} s, peak {part['peak_mb']:.0f} MB"
        rows.append(_row(f"plan of {part['rows']} rows, {name}", part["rows"] / part["seconds"], note=note))
    resumed = measured["resume"]
    per_second = resumed["units"] * DEFAULT_ROWS_PER_UNIT / resumed["seconds"]
    note = f"{resumed['seconds']:.2f} s, {resumed['open']} left to do"
    return [*rows, _row(f"resume of {resumed['units']} finished units", per_second, note=note)]


def _measure_verification(rounds: int) -> dict[str, Any]:
    show_progress("verification")
    return run_apart("verification", units=_VERIFIED_UNITS // _share(rounds))


def verification_row(measured: Mapping[str, Any]) -> Row:
    """Row of the verification of a finished destination."""
    note = (
        f"{measured['verify_s']:.1f} s, processor time {measured['verify_cpu_s']:.1f} s, listing "
        f"{measured['list_s']:.1f} s, memory grew by {measured['grown_mb']:.0f} MB"
    )
    title = f"verification of {measured['units']} units, {measured['rows']} rows"
    return _row(title, measured["rows"] / measured["verify_s"], note=note)


# Runs over three nodes in which something is killed at random moments, again and again.


def _measure_faults(seed: int, rounds: int) -> dict[str, Any]:
    """Score 200 units while workers (Ray's actors), nodes and the driver are killed.

    A killed node is a raylet with all its children; another one joins. After the driver was killed the same command
    runs again. In the end the destination is read.

    Returns:
        `rows`, `lost`, `twice`, `errors`, `kills` by kind, and `seconds`.
    """
    show_progress(f"run {seed + 1} of {_FAULT_RUNS} with faults")
    kills = _KILLS // _share(rounds)
    chance = random.Random(seed)  # noqa: S311 - reproducible
    killed: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="faults-") as name, ray_nodes(_NODES) as nodes:
        folder = Path(name)
        source = _write_digits(folder / "in", range(_FAULT_UNITS * _FAULT_ROWS_PER_UNIT))
        arguments = {"source": source, "model": DIGITS, "destination": folder / "out", "address": nodes.address}
        options = json.dumps({**arguments, "rows_per_unit": _FAULT_ROWS_PER_UNIT}, default=str)
        command = [sys.executable, score_runs.__file__, "score-for-faults", options]

        def kill_something(driver: subprocess.Popen[str]) -> None:
            (kind,) = chance.choices(list(_KINDS), list(_KINDS.values()))
            killed[kind] += 1
            if kind == "driver":
                driver.kill()
            elif kind == "node":
                nodes.add()
                nodes.kill(chance.choice(nodes.nodes))
            else:
                workers = processes_of("ray::WorkerActor")
                for worker in workers[: 1 + chance.randrange(max(1, len(workers)))]:
                    with suppress(psutil.NoSuchProcess):
                        worker.kill()

        begun, status = time.monotonic(), -9
        while status == -9:
            if time.monotonic() - begun > _LONGEST_RUN_S:
                raise TimeoutError(f"a run has not ended after {_LONGEST_RUN_S:.0f} s")
            with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
                assert driver.stdout is not None  # noqa: S101 - it is a pipe
                wait = 0  # commits until the next kill, so that kills spread over the run
                for _ in driver.stdout:
                    wait -= 1
                    if wait <= 0 and killed.total() < kills:
                        wait = chance.randint(1, 2 * _FAULT_UNITS // kills - 2)
                        time.sleep(chance.uniform(0, 0.3))
                        kill_something(driver)
                status = driver.wait()
        if status:
            raise RuntimeError(f"the driver ended with exit status {status}")
        seconds = round(time.monotonic() - begun, 1)

        found = _count_results(folder / "out", {path.name for path in source.iterdir()})
    return {**found, "kills": killed, "seconds": seconds}


def _count_results(destination: Path, expected: set[str]) -> dict[str, int]:
    """Count the rows of a finished destination that are missing, written twice, or hold an error."""
    ids: Counter[str] = Counter()
    errors = 0
    for path in destination.glob("*.parquet"):
        if not path.name.startswith(("_", ".")):
            table = pq.read_table(path, columns=["id", "error"])
            ids.update(table.column("id").to_pylist())
            errors += len(table) - table.column("error").null_count
    twice = sum(count - 1 for count in ids.values())
    return {"rows": len(expected), "lost": len(expected - ids.keys()), "twice": twice, "errors": errors}


def fault_row(runs: Sequence[Mapping[str, Any]]) -> Row:
    """Row of all runs with kills: rows that were lost or written twice."""
    kills = sum((Counter(run["kills"]) for run in runs), Counter[str]())
    rows, lost, twice, seconds = (sum(run[name] for run in runs) for name in ("rows", "lost", "twice", "seconds"))
    killed = ", ".join(f"{count} {name}" for name, count in sorted(kills.items()))
    title = f"digits, three nodes, {len(runs)} runs, killed: {killed}"
    return _row(title, rows / seconds, note=f"{lost} lost, {twice} twice of {rows}")


# Each measures for a number of rounds; its result is saved as JSON.
PARTS: dict[str, Callable[[int], Any]] = {
    **{precision: partial(_measure_precision, precision) for precision in _PRECISIONS},
    "memory": _measure_memory,
    "plan": _measure_plan,
    "verification": _measure_verification,
    **{f"faults {seed + 1}": partial(_measure_faults, seed) for seed in range(_FAULT_RUNS)},
}
