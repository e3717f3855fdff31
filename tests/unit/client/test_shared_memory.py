"""Shared memory with a fake server that maps the regions."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from canned import INFERRED, CannedHttp, http
from fake_transport import FakeTransport

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import (
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ProtocolError,
    ServerError,
)
from graphkiln_client import Client
from graphkiln_client.async_client import AsyncModel
from graphkiln_client.client import run
from graphkiln_client.connection import Connection
from graphkiln_client.shared_memory import Region, RegionPool
from graphkiln_client.transports.base import PROCESS, InferRequest, InferResponse, SharedTensor

X = {"X": np.arange(3, dtype=np.float32)}
SHM = Path("/dev/shm")


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Iterator[None]:
    before = set(SHM.glob("graphkiln-*"))
    yield
    assert set(SHM.glob(f"graphkiln-*{os.getpid()}-*")) - before == set()


class TestRegion:
    def test_existing_region_name(self) -> None:
        region = Region("graphkiln-test-c", 4096)
        with pytest.raises(InvalidInput, match="cannot create shared memory"):
            Region("graphkiln-test-c", 4096)
        assert (SHM / region.name).exists(), "the other one's name is not touched"
        region.close()

    def test_region_larger_than_shm(self) -> None:
        status = os.statvfs(SHM)
        with pytest.raises(InvalidInput, match="bytes of shared memory") as caught:
            Region("graphkiln-test-d", status.f_blocks * status.f_frsize + (1 << 30))
        assert "--shm-size" in caught.value.hint
        assert not (SHM / "graphkiln-test-d").exists()

    def test_machine_without_shared_memory(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr("graphkiln_client.shared_memory._FOLDER", tmp_path / "none")
        with pytest.raises(InvalidInput) as caught:
            Region("graphkiln-test-e", 4096)
        assert "/dev/shm" in caught.value.hint

    def test_array_outlives_region(self) -> None:
        region = Region("graphkiln-test-f", 4096)
        region.memory[:] = 5
        view = region.memory[:10].view()
        region.close()
        assert view.tolist() == [5] * 10


class Server(FakeTransport):
    """A server that maps regions like Triton; its model doubles numeric inputs and copies others."""

    def __init__(self, **tensors: tuple[str, list[int]]) -> None:
        self.regions: dict[str, mmap.mmap] = {}
        rows = [{"name": name, "datatype": dtype, "shape": shape} for name, (dtype, shape) in tensors.items()]
        super().__init__(
            {
                "model_metadata": {"inputs": rows, "outputs": [{**row} for row in rows]},
                "register_region": self.register,
                "unregister_region": lambda name: self.regions.pop(name, None),
                "region_status": self.status,
                "infer": self.infer,
            }
        )

    def register(self, name: str, key: str, size_bytes: int) -> None:
        with (SHM / key.lstrip("/")).open("r+b") as file:
            self.regions[name] = mmap.mmap(file.fileno(), size_bytes)

    def status(self, name: str) -> None:
        if name not in self.regions:
            raise InvalidInput(f"unknown region {name}")

    def memory(self, tensor: SharedTensor) -> memoryview:
        if tensor.region not in self.regions:
            raise InvalidInput(f"unknown region {tensor.region}")
        return memoryview(self.regions[tensor.region])[tensor.offset : tensor.offset + tensor.size_bytes]

    def read(self, tensor: Any) -> Any:
        if not isinstance(tensor, SharedTensor):
            return tensor
        return np.frombuffer(bytes(self.memory(tensor)), tensor.datatype.numpy).reshape(tensor.shape)

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        del timeout_s
        outputs: dict[str, Any] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, tensor in request.inputs.items():
            array = self.read(tensor)
            result = array if array.dtype.kind in "Ob" else (array + array).astype(array.dtype)
            shared = request.outputs[name].shared
            if shared is None:
                outputs[name] = result
            else:
                raw = result.tobytes()
                self.memory(shared)[: len(raw)] = raw
                shapes[name] = result.shape
        return InferResponse(model="m", version="1", outputs=outputs, shared_shapes=shapes)


class Shared:
    """A model over shared memory, closed at the end."""

    def __init__(self, server: Server, max_retries: int = 0, timeout_s: float = 10.0) -> None:
        connection = Connection(server, timeout_s, max_retries)
        self.pool = RegionPool(connection)
        settings: Any = {"preprocess": None, "labels": None, "fetch_urls": False}
        self._model = AsyncModel(connection, "m", "", **settings, regions=self.pool)

    def __enter__(self) -> AsyncModel:
        return self._model

    def __exit__(self, *_: object) -> None:
        run(self.pool.close())


class TestTensors:
    @pytest.mark.parametrize("dtype", [DType.FP32, DType.BF16, DType.BOOL])
    def test_all_types_round_trip(self, dtype: DType) -> None:
        x = np.arange(6).reshape(2, 3).astype(dtype.numpy)
        server = Server(X=(dtype.value, [-1, 3]))
        with Shared(server) as model:
            y = run(model.infer({"X": x}))["X"]
        assert y.dtype == dtype.numpy
        np.testing.assert_array_equal(y, x if dtype is DType.BOOL else x + x)
        (request,) = server.inferred()
        assert isinstance(request.inputs["X"], SharedTensor)
        assert request.outputs["X"].shared is not None

    def test_tensors_are_aligned(self) -> None:
        server = Server(A=("UINT8", [-1]), B=("FP32", [-1]), C=("BF16", [-1]))
        feeds = {
            "A": np.arange(5, dtype=np.uint8),
            "B": np.arange(5, dtype=np.float32),
            "C": np.arange(5).astype(ml_dtypes.bfloat16),
        }
        with Shared(server) as model:
            outputs = run(model.infer(feeds))
        for name, array in feeds.items():
            np.testing.assert_array_equal(outputs[name], array + array)
        (request,) = server.inferred()
        places = [tensor for tensor in request.inputs.values() if isinstance(tensor, SharedTensor)]
        places += [output.shared for output in request.outputs.values() if output.shared]
        places.sort(key=lambda place: place.offset)
        assert [place.offset % 64 for place in places] == [0] * 6
        ends = [place.offset + place.size_bytes for place in places]
        assert all(end <= place.offset for end, place in zip(ends, places[1:], strict=False))

    def test_results_are_copies(self) -> None:
        with Shared(Server(X=("FP32", [-1]))) as model:
            first = run(model.infer({"X": np.ones(3, np.float32)}))["X"]
            run(model.infer({"X": np.full(3, 9, np.float32)}))
        assert first.tolist() == [2, 2, 2]

    @pytest.mark.parametrize("shape", [(100_000,), (-1,), (2, 2)])
    def test_output_larger_than_region(self, shape: tuple[int, ...]) -> None:
        server = Server(X=("FP32", [-1]))
        server.responses["infer"] = InferResponse(model="m", version="1", outputs={}, shared_shapes={"X": shape})
        with Shared(server) as model, pytest.raises(ProtocolError, match="'X' of shape"):
            run(model.infer({"X": np.ones(3, np.float32)}))


class TestRegionPool:
    def test_small_region_is_replaced(self) -> None:
        server = Server(X=("FP32", [-1]))
        with Shared(server) as model:
            run(model.infer(X))
            large = np.ones(1 << 20, np.float32)
            assert run(model.infer({"X": large}))["X"].sum() == 2 << 20
            assert len(server.regions) == 1
            run(model.infer(X))
        sizes = [request.arguments[2] for request in server.sent("register_region")]
        assert sizes == [1 << 20, 8 << 20]

    def test_concurrent_requests_use_separate_regions(self) -> None:
        server = Server(X=("FP32", [-1]))
        server._suspends = True

        async def main() -> list[Any]:
            connection = Connection(server, 10.0, 0)
            pool = RegionPool(connection)
            settings: Any = {"preprocess": None, "labels": None, "fetch_urls": False}
            model = AsyncModel(connection, "m", "", **settings, regions=pool)
            calls = [model.infer({"X": np.full(4, value, np.float32)}) for value in range(6)]
            outputs = await asyncio.gather(*calls)
            await pool.close()
            return [output["X"].tolist() for output in outputs]

        assert asyncio.run(main()) == [[2.0 * value] * 4 for value in range(6)]
        assert len({request.inputs["X"].region for request in server.inferred()}) == 6  # type: ignore[union-attr]
        assert server.regions == {}

    def test_restarted_server_is_given_a_new_region(self) -> None:
        server = Server(X=("FP32", [-1]))
        with Shared(server) as model:
            run(model.infer(X))
            server.regions.clear()
            assert run(model.infer(X))["X"].tolist() == [0, 2, 4]
        assert len(server.sent("register_region")) == 2

    def test_rejected_request_keeps_region(self) -> None:
        server = Server(X=("FP32", [-1]))
        server.responses["infer"] = [InvalidInput("wrong shape"), server.infer]
        with Shared(server) as model:
            with pytest.raises(InvalidInput, match="wrong shape"):
                run(model.infer(X))
            assert run(model.infer(X))["X"].tolist() == [0, 2, 4]
        assert len(server.sent("register_region")) == 1

    @pytest.mark.parametrize("error", [DeadlineExceeded("late"), ConnectionFailed("gone"), ServerError("broken")])
    def test_region_is_not_reused_after_uncertain_failure(self, error: Exception) -> None:
        """The server may still write a late response to the region."""
        server = Server(X=("FP32", [-1]))
        server.responses["infer"] = [error, server.infer]
        with Shared(server) as model:
            with pytest.raises(type(error)):
                run(model.infer(X))
            run(model.infer(X))
            assert len(server.regions) == 2
        assert server.regions == {}

    @pytest.mark.parametrize("error", [InvalidInput("no"), ConnectionFailed("gone"), KeyboardInterrupt()])
    def test_unregistered_region_is_removed(self, error: BaseException) -> None:
        server = Server(X=("FP32", [-1]))

        def refuse(*_: object) -> None:
            raise error

        server.responses["register_region"] = refuse
        with Shared(server) as model, pytest.raises(type(error)):
            run(model.infer(X))

    def test_region_in_use_is_unregistered_later(self) -> None:
        server = Server(X=("FP32", [-1]))
        unregister = server.responses["unregister_region"]
        in_use = ServerError("cannot unregister shared memory region 'r', it is currently in use.")
        with Shared(server) as model:
            run(model.infer(X))
            server.responses["unregister_region"] = [in_use, in_use, unregister]
        assert not server.regions

    def test_region_that_stays_in_use(self) -> None:
        server = Server(X=("FP32", [-1]))
        with Shared(server, timeout_s=0.1) as model:
            run(model.infer(X))
            server.responses["unregister_region"] = ServerError("it is currently in use.")
        assert server.regions

    def test_repeatable_request_uses_shared_memory(self) -> None:
        server = Server(X=("FP32", [-1]))
        with Shared(server) as model:
            send = run(model.repeatable(X))
            assert [run(send()).outputs["X"].tolist() for _ in range(2)] == [[0, 2, 4]] * 2
        assert len(server.sent("register_region")) == 1


def test_region_that_cannot_be_replaced() -> None:
    metadata = http(b'{"name": "m", "inputs": [], "outputs": []}')
    done = http(b"{}")
    forgotten = [http(b"{}", "400 Bad"), http(b"{}", "404 No"), done]
    answers = [metadata, done, *forgotten, http(b"{}", "500 Oh"), done, INFERRED]
    with CannedHttp(answers) as server, Client(server.url) as client, client.shared_memory() as shared:
        model = shared.model("m")
        with pytest.raises(ServerError):
            model.infer(X)
        assert model.infer(X)["Y"] == [2]


def test_child_leaves_the_regions_of_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both map them: a region that a child used would hold its tensors in the answers of its parent."""
    server = Server(X=("FP32", [-1]))
    shared = Shared(server)
    with shared as model:
        run(model.infer(X))
        (parents,) = server.regions
        with monkeypatch.context() as patch:
            patch.setattr(PROCESS, "digits", lambda: "c" * 16)
            run(model.infer(X))
            assert len(server.regions) == 2
            run(shared.pool._regions._close_those(lambda _: True))
            assert [*server.regions] == [parents]
        assert run(model.infer(X))["X"].tolist() == [0, 2, 4]
    assert not server.regions
