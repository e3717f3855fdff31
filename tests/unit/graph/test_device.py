"""Devices as users write them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.graph.device import CPU, Device, DeviceKind
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
def test_is_parsed(text: str, device: Device) -> None:
    assert Device.parse(text) == device


@given(st.just(CPU) | st.builds(Device.gpu, st.integers(0, 1 << 20)))
def test_prints_what_it_parses(device: Device) -> None:
    assert Device.parse(str(device)) == device


@pytest.mark.parametrize(
    "text",
    ["", "CPU", "cpu:0", "cpu:", "gpu:", "gpu:-1", "gpu:1.0", "gpu:+1", "gpu: 1", "gpu:x", "gpu:0:1", "cuda", ":0"],
)
def test_nonsense_names_what_to_write(text: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Device.parse(text)
    assert caught.value.message == f"'{text}' is not a device"
    assert "gpu:0" in caught.value.hint


def test_the_cpu_has_no_number() -> None:
    assert (str(CPU), str(Device.gpu()), str(Device.gpu(3))) == ("cpu", "gpu:0", "gpu:3")
    assert not CPU.is_gpu
    assert Device.gpu(3).is_gpu


def test_equal_devices_are_one_key() -> None:
    assert len({CPU, Device.parse("cpu"), Device.gpu(1), Device.parse("gpu:1"), Device.gpu(2)}) == 3
