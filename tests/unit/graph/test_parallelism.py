"""How a model is spread over devices, in words."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.parallelism import Parallelism, Place


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (Parallelism(), "pipeline=1, tensor=1"),
        (Parallelism(data=2, pipeline=3, tensor=4), "data=2, pipeline=3, tensor=4"),
        (Parallelism(auto=True, memory_bytes=3 << 30), "auto, memory=3 GiB"),
        (Parallelism(pipeline=2, micro_batches=8), "pipeline=2, tensor=1, micro_batches=8"),
    ],
)
def test_numbers_in_words(numbers: Parallelism, words: str) -> None:
    assert str(numbers) == words


def test_what_was_chosen_is_no_choice_any_more() -> None:
    chosen = Parallelism(data=2, auto=True, memory_bytes=5).of(2, 3)
    assert chosen == Parallelism(data=2, pipeline=2, tensor=3, memory_bytes=5)
    assert (chosen.devices, chosen.splits) == (6, True)
    assert not Parallelism(data=4).splits


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (Place(CPU, (3,)), "core 3"),
        (Place(CPU, (2, 3, 4)), "cores 2-4"),
        (Place(CPU, (0, 4, 8)), "cores 0, 4, 8"),
        (Place(Device.gpu(1)), "gpu:1"),
    ],
)
def test_places_in_words(place: Place, words: str) -> None:
    assert str(place) == words
