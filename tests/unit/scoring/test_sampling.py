"""Rows that are scored to see how fast that is, by a clock that only the test moves."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from graphkiln.scoring.sampling import Piece, Rate, Sampler
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.scoring.opening import open_source
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.units import Unit


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for number in range(200):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)
        Image.fromarray(pixels).save(folder / f"{number:03}.png")
    (folder / "bad.png").write_bytes(b"no image")
    return folder


@pytest.fixture
def request_(photos: Path, digits: Path) -> ScoreRequest:
    return ScoreRequest(
        source=str(photos),
        model=str(digits),
        destination="/nowhere",
        backends=frozenset({"graphkiln"}),
        rows_per_unit=50,
    )


def units_of(request: ScoreRequest) -> list[Unit]:
    return [found.unit("c") for found in open_source(request).ranges(request.rows_per_unit)]


def test_a_rate_is_that_of_all_rows_and_its_interval_tells_how_pieces_differ() -> None:
    rate = Rate.of([Piece(rows=100, errors=1, seconds=1.0), Piece(rows=100, errors=0, seconds=1.0)])
    assert (rate.rows, rate.errors, rate.pieces, rate.per_s, rate.interval) == (200, 1, 2, 100, (100, 100))
    wider = Rate.of([Piece(rows=100, errors=0, seconds=s) for s in (0.9, 1.0, 1.1)])
    assert wider.interval is not None
    assert wider.interval[0] < wider.per_s < wider.interval[1]
    assert wider.least == wider.interval[0]


def test_one_piece_has_no_interval_and_is_believed_by_half() -> None:
    rate = Rate.of([Piece(rows=100, errors=0, seconds=1.0)])
    assert (rate.interval, rate.least) == (None, 50)


def test_rows_are_really_scored(request_: ScoreRequest) -> None:
    ticks = count()
    with Sampler(request_, place=lambda _: 1) as sampler:
        assert sampler.model == "digits version 1"
        assert "onnxruntime" in sampler.session
        rate = sampler.measure(units_of(request_), seconds=1e9, clock=lambda: float(next(ticks)))
    assert rate.rows == 201
    assert rate.errors == 1
    assert rate.interval is not None


def test_it_ends_when_the_time_is_over(request_: ScoreRequest) -> None:
    ticks = count()
    with Sampler(request_, place=lambda _: 1) as sampler:
        rate = sampler.measure(units_of(request_), seconds=1, clock=lambda: float(next(ticks)))
    assert rate.pieces == 1


def test_one_unit_is_measured_in_pieces(request_: ScoreRequest) -> None:
    ticks = count()
    whole = replace(request_, rows_per_unit=10**6)
    with Sampler(whole, place=lambda _: 1) as sampler:
        rate = sampler.measure(units_of(whole), seconds=20, clock=lambda: float(next(ticks)))
    assert (rate.rows, rate.pieces) == (201, 2)  # 64 rows a second, for a tenth of 20 seconds: 128, then the rest


def test_a_model_that_cannot_be_read_leaves_no_folder(request_: ScoreRequest, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(tmp_path))
        with pytest.raises(GraphkilnError):
            Sampler(replace(request_, outputs=("nothing",)), place=lambda _: 1)
    assert list(tmp_path.iterdir()) == []
