"""One whole run in a separate process: a program that prints what it measured, as JSON, in its last line.

    python score_runs.py graphkiln MODEL SOURCE DESTINATION CACHE WORKERS CORES ROWS_PER_UNIT
    python score_runs.py ray-data  GRAPH SOURCE DESTINATION CACHE WORKERS CORES ROWS_PER_UNIT

The time counts from the first image that a model is given until everything is written: starting Ray and loading models
take as long for ten images as for a million. What the peer reads before its model is there is given to it.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from graphkiln_backend.engines.hardware import saturates_products_of_bytes
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.scoring.driver import score_data_set
from graphkiln_backend.scoring.messages import ScoreRequest, StageTimes, UnitCommitted

# Of torchvision's weights.
PREPROCESS = Preprocess(
    resize=232, crop=(224, 224), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), interpolation="bilinear"
)


def request_for(model: Path, source: Path, destination: Path, cache: Path, cores: int, *, rows: int) -> ScoreRequest:
    """Top-5 of a folder of images.

    Args:
        model: The model's folder.
        source: The images.
        destination: Where the answers go.
        cache: Of artifacts.
        cores: Of each worker.
        rows: Of a unit; few, where a run is short and its last units must not be most of it.
    """
    return ScoreRequest(
        source=str(source),
        model=model,
        destination=str(destination),
        backends=frozenset({"graphkiln"}),
        cores_per_worker=cores,
        cache=cache,
        rows_per_unit=rows,
    )


_BATCH = 8
# As graphkiln computes on a CPU without VNNI: ONNX Runtime is faster otherwise, and 45% of a signal may be wrong.
_EXACT_PRODUCTS = ("session.x64quantprecision", "1")
_SAMPLE_S = 0.5
_WORKER = "ray::WorkerActor"


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """Memory at some time of a run.

    Attributes:
        rows: That were done.
        worker_mb: Resident, of the largest worker.
        driver_mb: Resident, of the driver.
    """

    rows: int
    worker_mb: float
    driver_mb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class RunReport:
    """What a run came to.

    Attributes:
        rows: Rows with an answer.
        seconds: From the first image until everything was written.
        stages: Seconds of each stage, of all units together; empty for the peer.
        readings: Of memory, in order.
    """

    rows: int
    seconds: float
    stages: dict[str, float] = field(default_factory=dict)
    readings: list[Reading] = field(default_factory=list)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> RunReport:
        """What `asdict` made of one."""
        return cls(**{**document, "readings": [Reading(**reading) for reading in document["readings"]]})

    @property
    def per_second(self) -> float:
        """Rows."""
        return self.rows / self.seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is to be run.

    Attributes:
        model: The model's folder, or a graph.
        source: A folder of images.
        destination: Where the answers go.
        cache: Of artifacts.
        workers: How many.
        cores: Of each.
        rows: Of a unit.
    """

    model: Path
    source: Path
    destination: Path
    cache: Path
    workers: int
    cores: int
    rows: int


def run_graphkiln(job: Job) -> RunReport:
    """Score a folder of images."""
    starts: list[float] = []
    times: list[StageTimes] = []
    memory = _Memory()

    def note(event: object) -> None:
        if isinstance(event, UnitCommitted):
            starts.append(time.monotonic() - event.report.seconds)
            times.append(event.report.times)
            memory.rows += event.report.rows

    request = request_for(job.model, job.source, job.destination, job.cache, job.cores, rows=job.rows)
    with memory:
        score_data_set(replace(request, workers=job.workers), note)
        ended = time.monotonic()
    stages = asdict(reduce(add, times, StageTimes()))
    return RunReport(
        rows=memory.rows,
        seconds=ended - min(starts),
        stages=stages,
        readings=memory.readings,
    )


def run_ray_data(job: Job) -> RunReport:
    """The same with what Ray Data's manual shows: read, map, map batches with a class, write."""
    import ray
    import ray.data

    with tempfile.TemporaryDirectory(prefix="graphkiln-ray-") as scratch:
        first = Path(scratch) / "first"
        ray.init(
            num_cpus=job.workers * job.cores, include_dashboard=False, log_to_driver=False, configure_logging=False
        )
        try:
            ray.data.DataContext.get_current().enable_progress_bars = False
            images = ray.data.read_images(str(job.source), mode="RGB", include_paths=True)
            answers = images.map(_preprocess).map_batches(
                _Classifier,
                fn_constructor_args=(str(job.model), job.cores, str(first)),
                batch_size=_BATCH,
                concurrency=job.workers,
                num_cpus=1,
            )
            answers.write_parquet(str(job.destination))
            ended = time.time()
        finally:
            ray.shutdown()
        return RunReport(rows=_count_rows(job.destination), seconds=ended - first.stat().st_mtime)


def _count_rows(folder: Path) -> int:
    import pyarrow.parquet as pq

    return sum(pq.read_metadata(path).num_rows for path in folder.glob("*.parquet"))


def _preprocess(row: dict[str, Any]) -> dict[str, Any]:
    from graphkiln_backend.images.decoding import load_sample

    return {"path": row["path"], "sample": load_sample(row["image"], PREPROCESS)}


class _Classifier:
    """A session of ONNX Runtime, as a user of Ray Data writes it, who wants right answers in int8, too."""

    def __init__(self, graph: str, threads: int, first: str) -> None:
        import onnxruntime

        settings = onnxruntime.SessionOptions()
        settings.intra_op_num_threads = threads
        if saturates_products_of_bytes():
            settings.add_session_config_entry(*_EXACT_PRODUCTS)
        self._session = onnxruntime.InferenceSession(graph, settings, providers=["CPUExecutionProvider"])
        self._first = Path(first)

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        if not self._first.exists():
            self._first.touch()
        name = self._session.get_inputs()[0].name
        (scores,) = self._session.run(None, {name: np.ascontiguousarray(batch["sample"])})
        best = np.argsort(-scores, axis=1)[:, :5]
        return {"path": batch["path"], "indices": best, "scores": np.take_along_axis(scores, best, axis=1)}


class _Memory:
    """Reads the memory of this process and of Ray's workers while a block runs."""

    def __init__(self) -> None:
        self.rows = 0
        self.readings: list[Reading] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        own = psutil.Process()
        while not self._done.wait(_SAMPLE_S):
            workers = [resident_mb(child) for child in own.children(recursive=True) if is_worker(child)]
            if workers:
                reading = Reading(rows=self.rows, worker_mb=max(workers), driver_mb=resident_mb(own))
                self.readings.append(reading)


def is_worker(process: psutil.Process) -> bool:
    """Return true if a process is one of Ray's actors that compute."""
    try:
        return any(_WORKER in word for word in process.cmdline())
    except psutil.Error:
        return False


def resident_mb(process: psutil.Process) -> float:
    """Memory of a process; 0 where it has ended."""
    try:
        return float(process.memory_info().rss) / 2**20
    except psutil.Error:
        return 0.0


RUNS: dict[str, Callable[[Job], RunReport]] = {"graphkiln": run_graphkiln, "ray-data": run_ray_data}


def main() -> None:
    """Run what the command line names."""
    name, model, source, destination, cache, workers, cores, rows = sys.argv[1:]
    job = Job(
        model=Path(model),
        source=Path(source),
        destination=Path(destination),
        cache=Path(cache),
        workers=int(workers),
        cores=int(cores),
        rows=int(rows),
    )
    report = RUNS[name](job)
    print(f"\n{json.dumps(asdict(report))}", flush=True)


if __name__ == "__main__":
    main()
