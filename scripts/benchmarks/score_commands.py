"""`graphkiln score` as a whole command, from its start to its end, beside programs for Daft and Ray Data.

Every command decodes the same JPEG files by the same function and computes the top-5 of ResNet-50 in one session of
ONNX Runtime with the same settings and threads. graphkiln commits, proves and notes what it does besides. Memory is the
largest sum over all processes of a command. Each part is saved when it is measured, and an interrupted benchmark
continues with the next part.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import score_peers
from inputs import CACHE, add_model, parameters
from measurement import ratio_of, show_progress, take_turns
from precision_speed import prepare
from reporting import Parts
from score_runs import EXACT_PRODUCTS
from score_speed import OURS, PEER, write_photographs

from graphkiln.bench.meters import ProcessMeter
from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.graph.errors import LoweringError, MeasurementError
from graphkiln_backend.system.resources import usable_cores

FIRST, DAFT = f"{OURS}, first run of a model", "Daft"
_PROGRAMS = {DAFT: "daft", PEER: "ray-data"}
KEPT = CACHE / "score_commands"
_IMAGES = (320, 5000)
_MANY = 1000  # of so many images, one round of the faster peer is long enough
_SAMPLE_S = 0.5
# Of graphkiln's sessions while something else runs on their cores; Daft's pipeline was faster with it, too.
_SETTINGS = {"session.intra_op.allow_spinning": "0"}
# The fastest of 1, 8 and 32.
_BATCH_ROWS = {"fp32": 8, "int8": 8}
Row = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Whole:
    """A whole command: elapsed time, and the largest PSS of all of its processes together."""

    seconds: float
    peak_mb: float


def benchmark_commands(rounds: int, seconds: float, only: str = "") -> list[Row]:
    """Measure all parts that are not saved, and return the rows of all saved parts.

    Args:
        rounds: Measured rounds of the few images; the many are measured once, and beside Daft alone.
        seconds: Not used; commands take the time that they take.
        only: Measure this part again, or those whose names begin with this word, and no other.
    """
    known = {f"{precision} {images}": (precision, images) for precision in _BATCH_ROWS for images in _IMAGES}
    names = [name for name in known if not only or name == only or name.startswith(f"{only} ")]
    if not names:
        sys.exit(f"score_commands has no part {only}; there are {', '.join(known)}")
    parts = Parts(KEPT, rounds, seconds)
    for name in names:
        precision, images = known[name]
        parts.measure(name, partial(_measure, precision, images, rounds), again=bool(only))
        show_progress("")
    return [row for name in known for row in rows_of(name, parts.read(name) or {})]


def _measure(precision: str, images: int, rounds: int) -> dict[str, list[dict[str, float]]]:
    graphs = prepare("resnet50")
    graph = graphs.int8 if precision == "int8" else graphs.fp32
    if graph is None:
        raise LoweringError("ResNet-50 cannot be quantized here", attempts=())
    with tempfile.TemporaryDirectory(prefix="graphkiln-score-") as name:
        folder = Path(name)
        model = folder / "store" / "resnet50"
        ours = {"preprocess": score_peers.PREPROCESS.to_json(), "engine": "onnxruntime"}
        add_model(model.parent, model.name, graph, f"\n{parameters(ours)}")
        settings = _SETTINGS | (dict([EXACT_PRODUCTS]) if saturates_products_of_bytes() else {})
        common = {"graph": graph, "cores": usable_cores(), "settings": settings}

        def run(name: str, source: Path, _: float = 0.0) -> Whole:
            with tempfile.TemporaryDirectory(dir=folder) as destination:
                if name == OURS:
                    program: list[object] = [Path(sys.executable).with_name("graphkiln"), "score", source]
                    options = ["--model", model, "--out", destination, "--cache", folder / "cache"]
                    whole = run_whole([*map(str, [*program, *options]), "--progress", "off"])
                else:
                    batch = {"batch_rows": _BATCH_ROWS[precision]} if name == DAFT else {}
                    peer = {"source": source, "destination": destination, **common, **batch}
                    command = [sys.executable, score_peers.__file__, _PROGRAMS[name]]
                    whole = run_whole([*command, json.dumps(peer, default=str)])
                _check_rows(Path(destination), len(list(source.iterdir())), name)
            return whole

        photographs = write_photographs(folder / "photographs", images)
        if images >= _MANY:
            run(OURS, write_photographs(folder / "few", _MANY // 50))  # fills the cache
            names, rounds, found = [OURS, DAFT], 1, {}
        else:
            show_progress(f"{precision} {images}: {FIRST}")
            names, found = [OURS, DAFT, PEER], {FIRST: [run(OURS, photographs)] * rounds}
        runs = {each: partial(run, each, photographs) for each in names}
        found |= take_turns(f"{precision} {images}, ", runs, rounds, 0.0, warm_up=False)
    return {name: [asdict(each) for each in wholes] for name, wholes in found.items()}


def run_whole(command: Sequence[str]) -> Whole:
    """Run a command, and read the memory of its processes twice a second.

    Raises:
        MeasurementError: It failed.
    """
    peak = 0
    with tempfile.TemporaryFile("w+") as printed:
        begun = time.perf_counter()
        with subprocess.Popen(command, stdout=printed, stderr=subprocess.STDOUT) as process:
            meter = ProcessMeter(process.pid)
            while (status := _status(process)) is None:
                peak = max(peak, meter.memory_bytes() or 0)  # None while a process ends
            seconds = time.perf_counter() - begun
        if status:
            printed.seek(0)
            raise MeasurementError(f"{command[0]} ended with exit status {status}: {printed.read()[-3000:]}")
    return Whole(seconds=seconds, peak_mb=peak / 2**20)


def _status(process: subprocess.Popen[bytes]) -> int | None:
    try:
        return process.wait(_SAMPLE_S)
    except subprocess.TimeoutExpired:
        return None


def _check_rows(destination: Path, images: int, name: str) -> None:
    files = [path for path in destination.glob("*.parquet") if not path.name.startswith("_")]
    if (rows := sum(pq.read_metadata(path).num_rows for path in files)) != images:
        raise MeasurementError(f"{name} wrote {rows} rows of {images} images")


def rows_of(title: str, found: Mapping[str, Sequence[Mapping[str, float]]]) -> Iterator[Row]:
    """Compare commands with Daft's and Ray Data's, round by round."""
    for name, wholes in found.items():
        seconds = _column(wholes, "seconds")
        daft, ray_data = (_column(found.get(peer, ()), "seconds") for peer in (DAFT, PEER))
        faster = ratio_of(daft, seconds)
        memory = ratio_of(_column(wholes, "peak_mb"), _column(found[DAFT], "peak_mb"))
        yield {
            "row": f"{title}, {name}",
            "s": round(statistics.median(seconds), 2),
            "ratio": faster.median,
            "spread": faster.spread,
            "to Ray Data": ratio_of(ray_data, seconds).median if ray_data else "-",
            "peak MB": round(statistics.median(_column(wholes, "peak_mb"))),
            "memory ratio": memory.median,
        }


def _column(wholes: Sequence[Mapping[str, float]], name: str) -> list[float]:
    return [each[name] for each in wholes]
