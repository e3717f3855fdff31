"""Transport of tensors on the host, and on devices with a fake NCCL."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import split_graphs
from graphs import draw
from lowered import ORT
from split_graphs import spread

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.device import CPU, Device, Place
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.lowering.parallel import building
from graphkiln_backend.lowering.parallel import building as transport
from graphkiln_backend.lowering.parallel.building import DeviceTransport, HostTransport, build_split, choose_transport
from graphkiln_backend.lowering.parallel.parts import PreparedParts
from graphkiln_backend.repository.onnx_file import read_signature


def on_devices(*_: object, adds: bool) -> HostTransport:
    return DeviceTransport() if adds else HostTransport()


GPUS = (Place(Device.gpu(0)), Place(Device.gpu(1)))


class Tensor:
    """The part of PyTorch's tensors that is used."""

    def __init__(self, array: AnyArray) -> None:
        self.array = array
        self.device = "cuda:0"

    def numel(self) -> int:
        return int(self.array.size)

    def cpu(self) -> Tensor:
        return self

    def numpy(self) -> AnyArray:
        return self.array

    def __dlpack__(self, *, stream: Any = None) -> Any:
        return self.array.__dlpack__()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.array.__dlpack_device__()


class Nccl:
    """Fake NCCL: adds into separate outputs, counts its calls, and fails on request."""

    def __init__(self) -> None:
        self.calls = 0
        self.fails = False
        self.available = True

    def all_reduce(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        if self.fails:
            raise RuntimeError("NCCL Error 6: remote process exited or there was a network error")
        self.calls += 1
        total = np.sum([each.array for each in inputs], axis=0)
        for each in outputs:
            each.array[...] = total


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> Nccl:
    """Fake PyTorch with GPUs."""
    found = Nccl()
    synchronized: list[object] = []
    torch = SimpleNamespace(
        from_dlpack=lambda tensor: Tensor(np.from_dlpack(tensor)),
        empty_like=lambda tensor: Tensor(np.empty_like(tensor.array)),
        cuda=SimpleNamespace(nccl=found, synchronize=synchronized.append),
        distributed=SimpleNamespace(is_available=lambda: True, is_nccl_available=lambda: found.available),
    )
    monkeypatch.setitem(sys.modules, "torch", torch)  # type: ignore[arg-type]
    monkeypatch.setattr(transport, "find_spec", lambda _: object())
    return found


def test_shards_by_nccl_equal_shards_by_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: Nccl) -> None:
    graph = split_graphs.save(split_graphs.attention(), tmp_path / "whole")
    config = spread(graph, tmp_path / "parts", 1, 2)
    x, engine, signature = draw(3, 5, 24, seed=1), OnnxRuntimeEngine(), read_signature(graph)
    with build_split(engine, PreparedParts(folder=tmp_path / "parts"), config, signature) as by_host:
        expected = by_host.run({"x": x})["y"]
    monkeypatch.setattr(building, "choose_transport", on_devices)
    with build_split(engine, PreparedParts(folder=tmp_path / "parts"), config, signature) as split:
        np.testing.assert_array_equal(split.run({"x": x})["y"], expected)
        assert nccl.calls == 2, "behind the attention, and behind the MLP"
        assert sum(split.placement({"x": x}).products.values()) > 0
        nccl.fails = True
        with pytest.raises(ExecutionError, match="NCCL failed: NCCL Error 6"):
            split.run({"x": x})
        nccl.fails = False
        np.testing.assert_array_equal(split.run({"x": x})["y"], expected)


def test_stages_on_devices_equal_stages_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph = split_graphs.save(split_graphs.convolutions(), tmp_path / "whole")
    config = spread(graph, tmp_path / "parts", 3)
    x, engine, signature = draw(5, 3, 16, 16, seed=1), OnnxRuntimeEngine(), read_signature(graph)
    with build_split(engine, PreparedParts(folder=tmp_path / "parts"), config, signature) as by_host:
        expected, ran = by_host.run({"x": x})["y"], by_host.placement({"x": x})
    monkeypatch.setattr(building, "choose_transport", lambda *_, **__: DeviceTransport())
    with build_split(engine, PreparedParts(folder=tmp_path / "parts"), config, signature) as split:
        for _ in range(2):
            np.testing.assert_array_equal(split.run({"x": x})["y"], expected)
        assert split.placement({"x": x}).products == ran.products


def test_partial_sums_are_not_changed(nccl: Nccl) -> None:
    partials = [Tensor(np.ones(2, np.float32)), Tensor(np.full(2, 2, np.float32))]
    totals = DeviceTransport().add(partials)
    assert [total.array.tolist() for total in totals] == [[3, 3], [3, 3]]
    assert [partial.array.tolist() for partial in partials] == [[1, 1], [2, 2]]
    assert nccl.calls == 1


def test_empty_batch_needs_no_reduction(nccl: Nccl) -> None:
    totals = DeviceTransport().add([Tensor(np.ones((0, 4), np.float32))] * 2)
    assert [total.array.shape for total in totals] == [(0, 4)] * 2
    assert not nccl.calls


class OnDevice:
    """A session that could leave its tensors on a device."""

    def __init__(self, why_not: str = "") -> None:
        self.why_not_on_device = why_not

    signature: Any = None

    def run(self, *_: Any) -> Any: ...

    def run_on_device(self, *_: Any) -> Any: ...

    def placement(self, *_: Any) -> Any: ...

    def close(self) -> None: ...

    def __enter__(self) -> Any: ...

    def __exit__(self, *_: object) -> None: ...


class TestChoice:
    CPUS = (Place(CPU, (0,)), Place(CPU, (1,)))

    @pytest.mark.usefixtures("nccl")
    def test_tensors_stay_on_gpus(self, logged: list[str]) -> None:
        session: Any = OnDevice()
        for adds in (True, False):
            assert isinstance(choose_transport(GPUS, [session] * 2, adds=adds), DeviceTransport)
            assert type(choose_transport(self.CPUS, [session] * 2, adds=adds)) is HostTransport
        assert type(choose_transport(GPUS, [session], adds=False)) is HostTransport, "one stage hands nothing on"
        assert not logged

    @pytest.mark.parametrize("adds", [True, False])
    @pytest.mark.parametrize(
        ("session", "reason"),
        [
            (OnDevice("'x' is BYTES, which cannot be bound"), "'x' is BYTES"),
            (SimpleNamespace(), "SimpleNamespace does not leave its tensors on a device"),
        ],
    )
    @pytest.mark.usefixtures("nccl")
    def test_unsuitable_sessions(self, session: Any, reason: str, adds: bool, logged: list[str]) -> None:
        assert type(choose_transport(GPUS, [OnDevice(), session], adds=adds)) is HostTransport
        (line,) = logged
        assert reason in line

    def test_pytorch_without_nccl(self, nccl: Nccl, logged: list[str]) -> None:
        nccl.available = False
        assert type(choose_transport(GPUS, [], adds=True)) is HostTransport
        assert "this build of PyTorch has no NCCL" in logged[0]

    def test_missing_pytorch(self, monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
        monkeypatch.setattr(transport, "find_spec", lambda _: None)
        assert type(choose_transport(GPUS, [], adds=True)) is HostTransport
        assert "pip install 'graphkiln[parallel]'" in logged[0]


def test_host_sums_follow_the_order_of_shards() -> None:
    large, small = np.array([1e8], np.float32), np.array([1.0], np.float32)
    host = HostTransport()
    assert host.add([large, -large, small]) == [np.float32(1)] * 3
    assert host.add([small, large, -large]) == [np.float32(0)] * 3, "another order has other roundings"
    assert (large, small) == (np.float32(1e8), np.float32(1))


@pytest.mark.slow
def test_with_the_real_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library with tensors on the CPU; only NCCL is replaced."""
    import torch

    assert list(inspect.signature(torch.cuda.nccl.all_reduce).parameters)[:2] == ["inputs", "outputs"]

    def all_reduce(inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        for each in outputs:
            each.copy_(inputs[0] + inputs[1])

    monkeypatch.setattr(torch.cuda.nccl, "all_reduce", all_reduce)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _: None)
    monkeypatch.setattr(building, "choose_transport", on_devices)
    graph = split_graphs.save(split_graphs.mlp(), tmp_path / "whole")
    engine, x = OnnxRuntimeEngine(), draw(3, 24, seed=1)
    config = spread(graph, tmp_path / "parts", 1, 2)
    with (
        engine.build(graph, ORT) as whole,
        build_split(engine, PreparedParts(folder=tmp_path / "parts"), config, read_signature(graph)) as split,
    ):
        np.testing.assert_allclose(split.run({"x": x})["y"], whole.run({"x": x})["y"], rtol=1e-5, atol=1e-5)
