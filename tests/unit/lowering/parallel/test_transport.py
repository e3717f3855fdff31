"""Transport of tensors: on the host, and on devices with everything but NCCL itself, whose interface is PyTorch's."""

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
    """What is used of a tensor of PyTorch's."""

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
    """Adds as NCCL does: into outputs of their own; counts its calls, and fails when it is told to."""

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
    """PyTorch as it would be on GPUs."""
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


def test_shards_compute_the_same_as_by_way_of_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nccl: Nccl
) -> None:
    """From the arrays of a request to those of its response, with tensors of the engine in between."""
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


def test_stages_hand_on_what_lies_on_their_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits as by way of the host, batch after batch."""
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


def test_partial_sums_stay_as_they_are(nccl: Nccl) -> None:
    """They may lie in a session's own memory."""
    partials = [Tensor(np.ones(2, np.float32)), Tensor(np.full(2, 2, np.float32))]
    totals = DeviceTransport().add(partials)
    assert [total.array.tolist() for total in totals] == [[3, 3], [3, 3]]
    assert [partial.array.tolist() for partial in partials] == [[1, 1], [2, 2]]
    assert nccl.calls == 1


def test_nothing_is_sent_for_batches_of_no_rows(nccl: Nccl) -> None:
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
    """Which transport is chosen, and the reason where it is slower than it could be."""

    CPUS = (Place(CPU, (0,)), Place(CPU, (1,)))

    @pytest.mark.usefixtures("nccl")
    def test_gpus_keep_tensors_on_the_device(self, logged: list[str]) -> None:
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
    def test_sessions_that_cannot(self, session: Any, reason: str, adds: bool, logged: list[str]) -> None:
        assert type(choose_transport(GPUS, [OnDevice(), session], adds=adds)) is HostTransport
        (line,) = logged
        assert reason in line

    def test_a_pytorch_without_nccl(self, nccl: Nccl, logged: list[str]) -> None:
        nccl.available = False
        assert type(choose_transport(GPUS, [], adds=True)) is HostTransport
        assert "this build of PyTorch has no NCCL" in logged[0]

    def test_no_pytorch(self, monkeypatch: pytest.MonkeyPatch, logged: list[str]) -> None:
        monkeypatch.setattr(transport, "find_spec", lambda _: None)
        assert type(choose_transport(GPUS, [], adds=True)) is HostTransport
        assert "pip install 'graphkiln[parallel]'" in logged[0]


def test_sums_on_the_host_are_new_arrays_in_the_order_of_the_shards() -> None:
    large, small = np.array([1e8], np.float32), np.array([1.0], np.float32)
    host = HostTransport()
    assert host.add([large, -large, small]) == [np.float32(1)] * 3
    assert host.add([small, large, -large]) == [np.float32(0)] * 3, "another order has other roundings"
    assert (large, small) == (np.float32(1e8), np.float32(1))


@pytest.mark.slow
def test_pytorch_takes_what_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real library with tensors on the CPU; NCCL alone is another's, called as its signature says."""
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
