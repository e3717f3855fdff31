"""How many workers a node has room for."""

from __future__ import annotations

import pytest

from graphkiln_backend.scoring.cluster import Node, room_of


def node(cores: int, gpus: int = 0) -> Node:
    return Node(id="a", name="node", cores=cores, gpus=gpus)


@pytest.mark.parametrize(
    ("found", "per_worker", "on_gpu", "expected"),
    [
        (node(8), 0, False, (1, 8, 0)),
        (node(8), 2, False, (4, 2, 0)),
        (node(7), 2, False, (3, 2, 0)),
        (node(2), 16, False, (1, 2, 0)),
        (node(0), 2, False, (0, 0, 0)),
        (node(64, 8), 0, True, (8, 8, 1)),
        (node(64, 8), 0, False, (1, 64, 0)),
        (node(64, 8), 16, True, (4, 16, 1)),
        (node(16), 4, True, (4, 4, 0)),
        (node(2, 4), 0, True, (0, 0, 1)),
    ],
)
def test_room(found: Node, per_worker: int, on_gpu: bool, expected: tuple[int, int, int]) -> None:
    room = room_of(found, per_worker, on_gpu=on_gpu)
    assert (room.workers, room.cores, room.gpus) == expected
