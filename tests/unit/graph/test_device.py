"""Devices and distributions of a model as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.device import CPU, Device, DeviceKind, Parallelism, Place
from graphkiln_backend.graph.errors import ManifestError


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("cpu", CPU),
        ("gpu", Device(DeviceKind.GPU, 0)),
        ("gpu:0", Device(DeviceKind.GPU, 0)),
        ("gpu:12", Device(DeviceKind.GPU, 12)),
        ("gpu:007", Device(DeviceKind.GPU, 7)),
    ],
)
def test_parse(text: str, device: Device) -> None:
    assert Device.parse(text) == device


@given(st.just(CPU) | st.builds(Device.gpu, st.integers(0, 1 << 20)))
def test_round_trip(device: Device) -> None:
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize(
    "text",
    ["", "CPU", "cpu:0", "gpu:", "gpu:-1", "gpu:0:1", "cuda"],
)
def test_invalid_devices(text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Device.parse(text)
    assert caught.value.message == f"'{text}' is not a device"
    assert "gpu:0" in caught.value.hint


def test_text_of_devices() -> None:
    assert (str(CPU), str(Device.gpu()), str(Device.gpu(3))) == ("cpu", "gpu:0", "gpu:3")
    assert not CPU.is_gpu
    assert Device.gpu(3).is_gpu


# How a model is spread over devices, in words.


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (Parallelism(), "pipeline=1, tensor=1"),
        (Parallelism(data=2, pipeline=3, tensor=4), "data=2, pipeline=3, tensor=4"),
        (Parallelism(auto=True, memory_bytes=3 << 30), "auto, memory=3 GiB"),
        (Parallelism(pipeline=2, micro_batches=8), "pipeline=2, tensor=1, micro_batches=8"),
    ],
)
def test_text_of_parallelism(numbers: Parallelism, words: str) -> None:
    assert str(numbers) == words


def test_chosen_parallelism() -> None:
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
def test_text_of_places(place: Place, words: str) -> None:
    assert str(place) == words
