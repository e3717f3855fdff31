"""Runs of `graphkiln score` over three nodes in which something is killed at random moments, again and again.

Each run scores 200 units. Killed are workers (Ray's actors), nodes (a raylet with all that it started; another one
joins) and the driver (the same command is run again). In the end the destination is read: which rows are lost, which
are there twice.
"""

from __future__ import annotations

import io
import json
import pickle
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from PIL import Image
from ray_cluster import RayNodes, kill, processes_of, ray_nodes

from graphkiln_backend.scoring.messages import ScoreRequest

UNITS = 200
ROWS_PER_UNIT = 10
NODES = 3
_MODEL = Path(__file__).parents[2] / "model_repository" / "digits"
_KINDS = {"worker": 7, "node": 2, "driver": 1}  # how often each is chosen, beside the others
_LONGEST_RUN_S = 1800.0


def measure_faults(seed: int, kills: int) -> dict[str, Any]:
    """Measure what kills cost in one run.

    Returns:
        `rows`, `lost`, `twice` and `errors`, `kills` by what was killed, and the `seconds` that the run took.
    """
    with tempfile.TemporaryDirectory(prefix="faults-") as folder, ray_nodes(NODES) as nodes:
        begun = time.monotonic()
        killed = _Run(Path(folder), nodes, kills, seed).finish()
        found = _count(Path(folder) / "out")
        seconds = round(time.monotonic() - begun, 1)
    return {**{name: found[name] for name in ("rows", "lost", "twice", "errors")}, "kills": killed, "seconds": seconds}


class _Run:
    """One run, whose driver is a separate process."""

    def __init__(self, folder: Path, nodes: RayNodes, kills: int, seed: int) -> None:
        self._nodes, self._kills, self._random = nodes, kills, random.Random(seed)  # noqa: S311 - seeded
        self._request = ScoreRequest(
            source=str(_make_images(folder / "in")),
            model=_MODEL,
            destination=str(folder / "out"),
            backends=frozenset({"graphkiln"}),
            rows_per_unit=ROWS_PER_UNIT,
            cores_per_worker=1,
            address=nodes.address,
        )
        self._killed: Counter[str] = Counter()

    def finish(self) -> Counter[str]:
        """Run the same command until it has done its work; what was killed meanwhile."""
        deadline = time.monotonic() + _LONGEST_RUN_S
        while time.monotonic() < deadline:
            if self._drive() == 0:
                return self._killed
        raise TimeoutError(f"a run has not ended after {_LONGEST_RUN_S:.0f} s")

    def _drive(self) -> int:
        command = [sys.executable, __file__, pickle.dumps(self._request).hex()]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
            for _ in self._moments(driver):
                self._kill(driver)
            status = driver.wait()
        if status not in {0, -9}:
            raise RuntimeError(f"the driver ended with exit status {status}")
        return status

    def _moments(self, driver: subprocess.Popen[str]) -> Iterator[None]:
        """Some commits apart, as many as there are kills left, so that they spread over the run."""
        assert driver.stdout is not None  # noqa: S101 - it is a pipe
        wait = 0
        for _ in driver.stdout:
            wait -= 1
            if wait <= 0 and self._killed.total() < self._kills:
                wait = self._random.randint(1, 2 * UNITS // self._kills - 2)
                time.sleep(self._random.uniform(0, 0.3))
                yield

    def _kill(self, driver: subprocess.Popen[str]) -> None:
        (kind,) = self._random.choices(list(_KINDS), list(_KINDS.values()))
        self._killed[kind] += 1
        if kind == "driver":
            driver.kill()
        elif kind == "node":
            self._nodes.add()
            self._nodes.kill(self._random.choice(self._nodes.nodes))
        else:
            victims = processes_of("ray::WorkerActor")
            for victim in victims[: 1 + self._random.randrange(max(1, len(victims)))]:
                kill(victim)


def _make_images(folder: Path) -> Path:
    folder.mkdir()
    for number in range(UNITS * ROWS_PER_UNIT):
        content = io.BytesIO()
        Image.fromarray(np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)).save(content, "png")
        (folder / f"{number:05}.png").write_bytes(content.getvalue())
    return folder


def _count(destination: Path) -> Counter[str]:
    """Rows of a destination that is finished, held to what there were."""
    files = [path for path in destination.glob("*.parquet") if not path.name.startswith(("_", "."))]
    ids: Counter[str] = Counter()
    errors = 0
    for path in files:
        table = pq.read_table(path, columns=["id", "error"])
        ids.update(table.column("id").to_pylist())
        errors += len(table) - table.column("error").null_count
    expected = {f"{number:05}.png" for number in range(UNITS * ROWS_PER_UNIT)}
    twice = sum(count - 1 for count in ids.values())
    return Counter(rows=len(expected), lost=len(expected - ids.keys()), twice=twice, errors=errors)


def _drive(request: ScoreRequest) -> None:
    """The driver's process: a line per commit."""
    from graphkiln_backend.scoring.driver import score_data_set
    from graphkiln_backend.scoring.messages import UnitCommitted

    score_data_set(request, lambda event: print("committed", flush=True) if isinstance(event, UnitCommitted) else None)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _drive(pickle.loads(bytes.fromhex(sys.argv[1])))  # noqa: S301 - written by `_Run`
    else:
        print(json.dumps(measure_faults(seed=0, kills=50), indent=2))
