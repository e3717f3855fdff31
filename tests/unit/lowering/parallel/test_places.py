"""Who runs on which cores and GPUs."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.device import CPU, Device, Parallelism, Place
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.lowering.parallel.spreading import Machine, check_apart

BOTH = Parallelism(pipeline=2, tensor=2)


def on_cpu(numbers: Parallelism, cores: int, instance: int = 0, instances: int = 1) -> list[tuple[int, ...]]:
    machine = Machine(device=CPU, cores=range(10, 10 + cores), instances=instances, instance=instance)
    return [place.cores for place in machine.places(numbers)]


@pytest.mark.parametrize(
    ("count", "groups"),
    [(1, [(10, 11, 12, 13, 14)]), (2, [(10, 11, 12), (13, 14)]), (5, [(10,), (11,), (12,), (13,), (14,)])],
)
def test_groups_are_neighbors_and_nearly_equal(count: int, groups: list[tuple[int, ...]]) -> None:
    assert on_cpu(Parallelism(pipeline=count), 5) == groups


def test_stages_and_shards_share_no_core() -> None:
    assert on_cpu(BOTH, 8) == [(10, 11), (12, 13), (14, 15), (16, 17)]


def test_instances_share_no_core() -> None:
    numbers = Parallelism(data=2, pipeline=2)
    assert on_cpu(numbers, 4, 0, 2) == [(10,), (11,)]
    assert on_cpu(numbers, 4, 1, 2) == [(12,), (13,)]
    assert on_cpu(Parallelism(), 2, 1, 2) == [(11,)]


def test_gpus_behind_that_of_the_instance() -> None:
    found = Machine(device=Device.gpu(2), cores=[0], gpus=6, instances=2, instance=1).places(BOTH)
    assert found == tuple(Place(Device.gpu(index)) for index in (2, 3, 4, 5))


@pytest.mark.parametrize(
    ("numbers", "instances", "words"),
    [
        (Parallelism(data=2), 1, r"data=2 needs 2 instances.*its configuration has 1.*instance_group \[ \{ count: 2"),
        (Parallelism(pipeline=5), 1, r"pipeline=5, tensor=1 needs 5 groups.*4 cores"),
        (Parallelism(pipeline=2), 3, "3 instances of 2 groups; 4 cores"),
    ],
)
def test_what_the_machine_or_the_configuration_does_not_have(numbers: Parallelism, instances: int, words: str) -> None:
    with pytest.raises(LoweringError, match=words):
        on_cpu(numbers, 4, 0, instances)


@pytest.mark.parametrize(("gpus", "words"), [(5, "gpu:0, gpu:1, gpu:2, gpu:3, gpu:4"), (0, "none")])
def test_gpus_that_are_not_here(gpus: int, words: str) -> None:
    with pytest.raises(LoweringError, match=f"needs 4 GPUs from gpu:2 on; available GPUs: {words}"):
        Machine(device=Device.gpu(2), cores=[0], gpus=gpus).places(BOTH)


class TestInstancesThatShareStages:
    NUMBERS = Parallelism(data=1, pipeline=2)

    def test_all_of_them_have_the_cores_of_one_copy(self) -> None:
        assert [on_cpu(self.NUMBERS, 2, each, 2) for each in range(2)] == [[(10,), (11,)]] * 2

    def test_copies_are_taken_in_turn(self) -> None:
        numbers = Parallelism(data=2, pipeline=2)
        assert [on_cpu(numbers, 4, each, 4) for each in range(4)] == [[(10,), (11,)], [(12,), (13,)]] * 2

    @pytest.mark.parametrize(
        ("numbers", "instances", "device"),
        [
            (Parallelism(data=2, pipeline=2), 3, CPU),
            (Parallelism(data=1, tensor=2), 2, CPU),
            (Parallelism(data=1), 2, CPU),
            (NUMBERS, 2, Device.gpu(0)),
        ],
    )
    def test_where_nothing_is_gained_or_weights_would_be_held_again(
        self, numbers: Parallelism, instances: int, device: Device
    ) -> None:
        """Shards of a batch all work at once; each process has weights of its own on a GPU."""
        with pytest.raises(LoweringError, match=f"instances of the model.*its configuration has {instances}"):
            Machine(device=device, cores=range(8), gpus=8, instances=instances).places(numbers)


class TestGpusOfInstances:
    @pytest.mark.parametrize("gpus", [(), (3,), (0, 4), (4, 0), (0, 4, 8)])
    def test_far_enough_apart(self, gpus: tuple[int, ...]) -> None:
        check_apart(BOTH, gpus)

    @pytest.mark.parametrize(("gpus", "shared"), [((0, 1), 1), ((2, 0, 6), 2), ((5, 5), 5)])
    def test_one_that_two_would_have(self, gpus: tuple[int, ...], shared: int) -> None:
        """Each would hold parts of the model there, and there may not be memory for both."""
        words = rf"of 4 GPUs each would share gpu:{shared};.*gpus: \[ 0, 4"
        with pytest.raises(LoweringError, match=words):
            check_apart(BOTH, gpus)
