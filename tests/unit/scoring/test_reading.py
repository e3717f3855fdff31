"""Rows are prepared in their order, with the client's pixels, and in bounded memory."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import numpy as np
import pytest
from scored_images import SPEC, gray, grays, row

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import count_pixels
from graphkiln_backend.images.decoding import prepare as decode
from graphkiln_backend.scoring.errors import InputChanged, SourceUnavailable
from graphkiln_backend.scoring.reading import PreparedRow, Reader
from graphkiln_client.preparing import prepare

WHOLE = Preprocess(color="L", layout="HWC", dtype=DType.UINT8)


def reader(preprocess: Preprocess = SPEC, cores: int = 2, memory_bytes: int = 1 << 20) -> Reader:
    return Reader(preprocess, cores, memory_bytes)


def test_rows_keep_their_order_and_pixels() -> None:
    rows = grays(range(100))
    with reader() as opened:
        preparation = opened.prepare(rows, {}, 4)
        for given, found in zip(rows, preparation, strict=True):
            assert found.row is given
            assert found.sample is not None
            np.testing.assert_array_equal(found.sample, prepare(given.load(), SPEC).sample)
            preparation.release([found])
        assert opened.memory.held_bytes == opened.encoded.held_bytes == 0


def test_undecodable_row_has_an_error() -> None:
    rows = [row("a", b"no image"), row("b", gray(1)), row("c", OSError("disk"))]
    with reader() as opened:
        first, second, third = opened.prepare(rows, {}, 4)
    assert "not an image" in str(first.error)
    assert second.error is None
    assert third.error == "disk"


def test_quarantined_row_is_not_read() -> None:
    rows = [row("a", AssertionError("touched")), row("b", gray(1))]
    with reader() as opened:
        first, second = opened.prepare(rows, {0: "it ended its process"}, 4)
    assert (first.sample, first.error) == (None, "it ended its process")
    assert second.sample is not None


@pytest.mark.parametrize("error", [InputChanged("changed"), SourceUnavailable("away")])
def test_errors_of_the_unit_are_raised(error: Exception) -> None:
    with reader() as opened:
        rows = [*grays(range(20)), row("bad", error), *grays(range(20))]
        with pytest.raises(type(error)), opened.prepare(rows, {}, 4) as preparation:
            list(preparation)
        opened.close()
        assert opened.memory.held_bytes == opened.encoded.held_bytes == 0


def test_closing_early_releases_memory() -> None:
    with reader() as opened:
        with opened.prepare(grays(range(200)), {}, 4) as preparation:
            assert next(iter(preparation)).sample is not None
        opened.close()
        assert opened.memory.held_bytes == opened.encoded.held_bytes == 0


def test_memory_is_limited_in_bytes() -> None:
    side = 256
    large = gray(7, (side, side))
    most = 4 * side * side
    with reader(WHOLE, memory_bytes=most) as opened:
        held = []
        preparation = opened.prepare([row(str(number), large) for number in range(20)], {}, 8)
        for found in preparation:
            assert found.sample is not None
            held.append(opened.memory.held_bytes)
            preparation.release([found])
    assert max(held) <= most + 2 * 8 * side * side  # beside the row that is waited for
    assert len(held) == 20


def test_image_larger_than_the_limit_is_admitted() -> None:
    rows = grays(range(10))
    rows[5] = row("large", gray(5, (512, 512)))
    with reader(WHOLE, memory_bytes=1000) as opened:
        found: list[PreparedRow] = []
        for one in opened.prepare(rows, {}, 4):
            assert one.sample is not None
            found.append(one)  # held until the end, as a batch holds them
        assert [one.row.id for one in found] == [one.id for one in rows]


def test_at_most_one_decoder_per_core(monkeypatch: pytest.MonkeyPatch) -> None:
    inside: list[int] = []
    counting, running = threading.Lock(), set()

    def watched(content: bytes, spec: Preprocess) -> object:
        with counting:
            running.add(threading.get_ident())
            inside.append(len(running))
        prepared = decode(content, spec)
        with counting:
            running.discard(threading.get_ident())
        return prepared

    watching = SimpleNamespace(prepare=watched, count_pixels=count_pixels)
    monkeypatch.setattr("graphkiln_backend.scoring.reading.decoding", watching)
    with reader(cores=2) as opened:
        assert len(list(opened.prepare(grays(range(100)), {}, 50))) == 100
    assert max(inside) <= 2


def test_many_rows_are_read_in_parallel() -> None:
    together = threading.Barrier(8, timeout=20)

    def load() -> bytes:
        together.wait()
        return gray(1)

    rows = [type(one)(id=one.id, load=load) for one in grays(range(8))]
    with reader(cores=1) as opened:
        assert all(found.error is None for found in opened.prepare(rows, {}, 1))
