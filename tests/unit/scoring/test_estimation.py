"""`--dry-run`: the plan and the estimated duration; nothing is written."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from PIL import Image

from graphkiln.scoring.estimation import estimate_request, measure_rate, plan_units, plan_workers, rate_of
from graphkiln.scoring.options import build_request
from graphkiln_backend.scoring import ray_cluster
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.fleet import Node
from graphkiln_backend.scoring.messages import Row, ScoreRequest, StageTimes
from graphkiln_backend.scoring.plan import open_source
from graphkiln_backend.scoring.scorer import Scored


@pytest.fixture
def request_(tmp_path: Path, digits: Path, monkeypatch: pytest.MonkeyPatch) -> ScoreRequest:
    monkeypatch.setattr("graphkiln.scoring.estimation.MEASURED_S", 0.1)
    (tmp_path / "photos").mkdir()
    for number in range(40):
        Image.new("L", (8, 8), number).save(tmp_path / "photos" / f"{number}.png")
    return build_request(tmp_path / "photos", digits, tmp_path / "out", {"rows_per_unit": 10, "cores_per_worker": 1})


def commit(request: ScoreRequest, configuration: str, most: int) -> None:
    """Create result files of some units."""
    folder = Path(request.destination)
    folder.mkdir()
    for found, _ in zip(open_source(request).ranges(request.rows_per_unit), range(most), strict=False):
        (folder / f"{found.unit(configuration).id}.parquet").write_bytes(b"")


def test_new_run(request_: ScoreRequest, tmp_path: Path) -> None:
    steps: list[str] = []
    estimated = estimate_request(request_, steps.append)
    assert (estimated.planned.rows, estimated.planned.rows_left, estimated.planned.stale) == (40, 40, 0)
    assert estimated.rate is not None
    assert 0 < estimated.rate.rows <= 40
    assert estimated.workers.total == estimated.workers.here > 0
    foreseen = estimated.start_s + 40 / (estimated.rate.per_s * estimated.workers.total)
    assert estimated.seconds == pytest.approx(foreseen)
    assert any("scoring rows" in text for text in steps)
    assert not (tmp_path / "out").exists()


def test_committed_units_are_not_left(request_: ScoreRequest) -> None:
    first = estimate_request(request_)
    commit(request_, first.configuration, first.planned.units)
    (Path(request_.destination) / f"{'0' * 32}.parquet").write_bytes(b"")
    again = estimate_request(request_)
    assert (again.planned.units_before, again.planned.rows_left, again.planned.stale) == (first.planned.units, 0, 1)
    assert again.rate is None


def test_sample_is_of_the_units_left(request_: ScoreRequest, tmp_path: Path) -> None:
    for number in range(400):
        (tmp_path / "photos" / f"more-{number}.png").write_bytes(b"")
    many = replace(request_, rows_per_unit=2)
    commit(many, "c", 3)
    planned, kept = plan_units(many, "c")
    assert planned.units_before == 3
    assert len(kept) == 10
    assert [unit.id for unit in kept] == sorted(unit.id for unit in kept)


def test_nodes_of_a_cluster(request_: ScoreRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    @contextmanager
    def connect(address: str) -> Iterator[SimpleNamespace]:
        asked.append(address)
        yield SimpleNamespace(nodes=lambda: found)

    found = [Node(id=name, name=name, cores=cores, gpus=0) for name, cores in (("a", 0), ("b", 4))]
    monkeypatch.setattr(ray_cluster, "connect", connect)
    remote = replace(request_, address="head:6379", cores_per_worker=2)
    assert estimate_request(remote).workers.by_node == {"b": 2}
    assert estimate_request(replace(remote, workers=1)).workers.by_node == {"b": 1}
    assert asked == ["head:6379"] * 2


@pytest.mark.parametrize(("on_gpu", "workers", "cores"), [(True, 2, 4), (False, 1, 8)])
def test_workers_are_placed_as_by_the_run(
    request_: ScoreRequest, monkeypatch: pytest.MonkeyPatch, on_gpu: bool, workers: int, cores: int
) -> None:
    monkeypatch.setattr("graphkiln.scoring.estimation.gpus", lambda: ["first", "second"])
    monkeypatch.setattr("graphkiln.scoring.estimation.usable_cores", lambda: 8)
    placed = plan_workers(replace(request_, cores_per_worker=0), on_gpu=on_gpu)
    assert (placed.total, placed.here, placed.cores) == (workers, workers, cores)


@pytest.mark.parametrize("kind", ["KIND_CPU", "KIND_AUTO"])
def test_gpu_is_used_as_the_model_configures(
    request_: ScoreRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    model = shutil.copytree(request_.model, tmp_path / "digits")
    with (model / "config.pbtxt").open("a") as config:
        config.write(f"instance_group {{ kind: {kind} }}\n")

    def place(_: ScoreRequest, *, on_gpu: bool) -> None:
        raise ScoringError(f"asked for a GPU: {on_gpu}")

    monkeypatch.setattr("graphkiln.scoring.estimation.plan_workers", place)
    with pytest.raises(ScoringError, match=f"asked for a GPU: {kind == 'KIND_AUTO'}"):
        estimate_request(replace(request_, model=model))


class CountingScorer:
    """Answers rows without computing them; every tenth has an error."""

    def answer(self, rows: Iterable[Row]) -> Scored:
        errors = ["bad" if each.id.endswith("7.png") else None for each in rows]
        return Scored(table=pa.table({"error": pa.array(errors, pa.string())}), times=StageTimes())


@pytest.mark.parametrize(("rows", "seconds", "pieces"), [(10, 1e9, None), (10, 1, 1), (10**6, 1e9, 1)])
def test_measured_pieces_are_distributed_over_the_source(
    request_: ScoreRequest, rows: int, seconds: float, pieces: int | None
) -> None:
    units = [found.unit("c") for found in open_source(request_).ranges(rows)]
    scorer: Any = CountingScorer()
    ticks = count()
    rate = measure_rate(request_, scorer, units, seconds, clock=lambda: float(next(ticks)))
    assert rate.pieces == (pieces or len(units))
    if pieces is None:
        assert (rate.rows, rate.errors) == (40, 4)


def test_confidence_interval_follows_from_the_pieces() -> None:
    alike = rate_of([(100, 1, 1.0), (100, 0, 1.0)])
    assert (alike.rows, alike.errors, alike.pieces, alike.per_s, alike.interval) == (200, 1, 2, 100, (100, 100))
    wider = rate_of([(100, 0, seconds) for seconds in (0.9, 1.0, 1.1)])
    assert wider.interval is not None
    assert wider.interval[0] < wider.per_s < wider.interval[1]
    assert rate_of([(100, 0, 1.0)]).interval is None
