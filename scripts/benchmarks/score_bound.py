"""Lower bound of scoring time: decoding and the session, each alone on all cores, one after the other.

Their sum is the necessary work per image; the rest of a scorer's time is overhead.
Elapsed time tells how well stages overlap, processor time what they cost: the latter hardly depends on what else the
machine does.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from measurement import show_progress
from score_runs import PREPROCESS, request_for

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.images.decoding import load_sample
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.scoring.messages import Row
from graphkiln_backend.scoring.model import read_model
from graphkiln_backend.scoring.scorer import Scored, Scorer

_UNITS = 2  # scored at a time, as a worker does


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What an image takes: elapsed and processor time, in seconds."""

    elapsed_s: float
    cpu_s: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(elapsed_s=self.elapsed_s + other.elapsed_s, cpu_s=self.cpu_s + other.cpu_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Round:
    """One round: the parts alone, and the scorer."""

    decode: Cost
    session: Cost
    scorer: Cost

    @property
    def bound(self) -> Cost:
        """Both parts, one after the other."""
        return self.decode + self.session


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundReport:
    """What the rounds came to.

    Attributes:
        rounds: Each of them.
        session: What computed, in words.
        batch_size: That was chosen.
    """

    rounds: Sequence[Round]
    session: str
    batch_size: int


def measure_bound(model: Path, photographs: Path, cache: Path, cores: int, rounds: int) -> BoundReport:
    """Measure the parts and the scorer in turn; a first round is a warm-up and does not count."""
    request = request_for(model, photographs, photographs, cache, cores, rows=1)
    files = sorted(photographs.iterdir())
    found: list[Round] = []
    with ArtifactCache(cache) as artifacts:
        chosen = read_model(request, artifacts, cores)
        proven = chosen.build(artifacts)
        with proven.session, chosen.scorer(proven, request, cores, artifacts) as scorer:
            size = scorer.batch_size
            parts: list[Callable[[], object]] = [
                lambda: _decode_all(files, cores),
                lambda: _run_all(proven, len(files), size),
                lambda: _score_all(scorer, files),
            ]
            for number in range(rounds + 1):
                show_progress(f"{model.name}, round {number}/{rounds}")
                costs = [_timed(part, len(files)) for part in parts]
                if number:
                    found.append(Round(decode=costs[0], session=costs[1], scorer=costs[2]))
    show_progress("")
    return BoundReport(rounds=found, session=str(proven.config), batch_size=size)


def _timed(part: Callable[[], object], images: int) -> Cost:
    elapsed, cpu = time.perf_counter(), time.process_time()
    part()
    return Cost(elapsed_s=(time.perf_counter() - elapsed) / images, cpu_s=(time.process_time() - cpu) / images)


def _decode_all(files: Sequence[Path], cores: int) -> None:
    def decode(part: Sequence[Path]) -> None:
        for path in part:
            load_sample(path.read_bytes(), PREPROCESS)

    with ThreadPoolExecutor(cores) as pool:
        list(pool.map(decode, [files[number::cores] for number in range(cores)]))


def _run_all(proven: ProvenSession, images: int, size: int) -> None:
    (spec,) = proven.session.signature.inputs
    batch: dict[str, AnyArray] = {spec.name: np.random.default_rng(0).random((size, 3, 224, 224), np.float32)}
    for _ in range(images // size):
        proven.session.run(batch)


def _score_all(scorer: Scorer, files: Sequence[Path]) -> list[Scored]:
    rows = [Row(id=path.name, load=path.read_bytes) for path in files]
    units = [rows[number::_UNITS] for number in range(_UNITS)]
    with ThreadPoolExecutor(_UNITS) as pool:
        return list(pool.map(scorer.answer, units))
