"""Tensors in shared memory, for a client on the same machine as the server.

A region is a file in /dev/shm that both sides map. The file is unlinked as soon as the server has mapped it, so that
even a killed client leaves no files behind. The server unmaps it when the client unregisters it.

Source: Triton's system shared memory extension; shm_overview(7).
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import os
import uuid
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotFound, ProtocolError, ServerError
from graphkiln_client.connection import Connection
from graphkiln_client.transports.base import (
    Deadline,
    InferRequest,
    InferResponse,
    Owned,
    RequestedOutput,
    SharedTensor,
)
from graphkiln_client.transports.tensors import datatype_of, to_raw

_FOLDER = Path("/dev/shm")  # noqa: S108 - POSIX shared memory on Linux
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
_MIN_BYTES = 1 << 20
_IN_USE = "currently in use"  # Triton's error for a region with pending requests
_UNREGISTER_TIMEOUT_S = 5.0
_UNREGISTER_RETRY_S = 0.02


class Region:
    """A shared-memory region.

    Attributes:
        name: Name in /dev/shm and on the server.
        memory: Content, uint8 `[size_bytes]`.

    Raises:
        InvalidInput: The region cannot be created.
    """

    def __init__(self, name: str, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        path = _FOLDER / name
        try:
            file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        except OSError as error:
            raise InvalidInput(f"cannot create shared memory: {error}", hint="needs Linux and /dev/shm") from error
        self._path: Path | None = path
        try:
            os.posix_fallocate(file, 0, size_bytes)  # fail now if /dev/shm is full, instead of SIGBUS later
            self._map = mmap.mmap(file, size_bytes)
        except OSError as error:
            self.unlink()
            raise InvalidInput(
                f"cannot create {size_bytes} bytes of shared memory: {error}", hint="docker run --shm-size"
            ) from error
        finally:
            os.close(file)
        self.memory = np.frombuffer(self._map, np.uint8)

    def unlink(self) -> None:
        """Remove the file; the memory stays mapped."""
        if self._path:
            self._path.unlink(missing_ok=True)
            self._path = None

    def close(self) -> None:
        """Remove the file and unmap the memory."""
        self.unlink()
        del self.memory
        with suppress(BufferError):  # the caller still holds an array; the memory is unmapped with it
            self._map.close()


@dataclasses.dataclass(slots=True)
class _Regions:
    """Regions of one process; those of its parent are also mapped in the parent."""

    idle: deque[Region] = dataclasses.field(default_factory=deque)
    every: list[Region] = dataclasses.field(default_factory=list)


class RegionPool:
    """Regions of one client, each used by one request at a time. Thread- and task-safe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._regions = Owned(_Regions, self._discard_all, "shared memory", in_loop=False)

    async def infer(self, request: InferRequest, output_sizes: Mapping[str, tuple[int, DType]]) -> InferResponse:
        """Send a request with its tensors in shared memory.

        Args:
            request: Request with arrays as inputs and all outputs named. BYTES tensors and outputs of unknown size are
                sent in the message.
            output_sizes: Maximum size in bytes and datatype of each output to return in shared memory.

        Returns:
            The response; its arrays are copies.

        Raises:
            ClientError: The request failed.
        """
        size_bytes = _required_bytes(request, output_sizes)
        regions = self._regions.get() or await self._regions.open()
        region = await self._acquire(regions, size_bytes)
        try:
            response = await self._infer_in(region, request, output_sizes)
        except (InvalidInput, ModelNotFound):
            if await self._is_known(region):
                regions.idle.append(region)
                raise  # the server rejected the request, not the region
            await self._discard(regions, region)
            region = await self._acquire(regions, size_bytes)
            response = await self._infer_in(region, request, output_sizes)
        # Not reused after other errors: the server may still write a late response to the region.
        regions.idle.append(region)
        return response

    async def close(self) -> None:
        """Unregister all regions and free their memory, even if some calls fail."""
        await self._regions.close()

    async def _infer_in(
        self, region: Region, request: InferRequest, output_sizes: Mapping[str, tuple[int, DType]]
    ) -> InferResponse:
        inputs, end = _write_inputs(region, request.inputs)
        outputs: dict[str, RequestedOutput] = {}
        for name, requested in request.outputs.items():
            outputs[name] = requested
            if name in output_sizes and not requested.class_count:
                size_bytes, datatype = output_sizes[name]
                tensor = SharedTensor(region=region.name, offset=end, size_bytes=size_bytes, datatype=datatype)
                outputs[name] = RequestedOutput(shared=tensor)
                end += _aligned(size_bytes)
        response = await self._connection.infer(dataclasses.replace(request, inputs=inputs, outputs=outputs))
        arrays = dict(response.outputs)
        for name, shape in response.shared_shapes.items():
            if (shared := outputs[name].shared) is not None:
                arrays[name] = _read_output(region, name, shared, shape)
        return InferResponse(model=response.model, version=response.version, outputs=arrays)

    async def _is_known(self, region: Region) -> bool:
        """Check that the server still has the region; a restarted server does not."""
        try:
            await self._connection.call(self._connection.wire.region_status(region.name))
        except (InvalidInput, ModelNotFound):
            return False
        return True

    async def _acquire(self, regions: _Regions, size_bytes: int) -> Region:
        with suppress(IndexError):
            while True:
                region = regions.idle.pop()
                if region.size_bytes >= size_bytes:
                    return region
                await self._discard(regions, region)
        region = Region(f"graphkiln-client-{os.getpid()}-{uuid.uuid4().hex}", max(_aligned(size_bytes), _MIN_BYTES))
        try:
            call = self._connection.wire.register_region(region.name, f"/{region.name}", region.size_bytes)
            await self._connection.call(call)
        except BaseException:
            region.close()
            raise
        region.unlink()
        regions.every.append(region)
        return region

    async def _discard_all(self, regions: _Regions) -> None:
        regions.idle.clear()
        for region in list(regions.every):
            await self._discard(regions, region)

    async def _discard(self, regions: _Regions, region: Region) -> None:
        regions.every.remove(region)
        with suppress(ClientError):  # the server may have ended
            await self._unregister(region)
        region.close()

    async def _unregister(self, region: Region) -> None:
        """Unregister a region, waiting for its last request.

        The server releases a request shortly after it has responded, or much later if the client's deadline has passed.
        """
        connection = self._connection
        deadline = Deadline.after(min(connection.timeout_s, _UNREGISTER_TIMEOUT_S))
        while True:
            try:
                return await connection.call(connection.wire.unregister_region(region.name))
            except ServerError as error:
                if _IN_USE not in error.message or deadline.remaining_s <= _UNREGISTER_RETRY_S:
                    raise
            await connection.transport.sleep(_UNREGISTER_RETRY_S)


def _write_inputs(
    region: Region, arrays: Mapping[str, AnyArray | SharedTensor]
) -> tuple[dict[str, AnyArray | SharedTensor], int]:
    """Copy inputs into the region; return their locations and the offset of the first free byte."""
    written: dict[str, AnyArray | SharedTensor] = {}
    offset = 0
    for name, array in arrays.items():
        if isinstance(array, SharedTensor) or array.dtype.kind in "OSU":
            written[name] = array
            continue
        datatype = DType(datatype_of(name, array))
        raw = to_raw(array)
        region.memory[offset : offset + len(raw)] = np.frombuffer(raw, np.uint8)
        written[name] = SharedTensor(
            region=region.name, offset=offset, size_bytes=len(raw), datatype=datatype, shape=array.shape
        )
        offset += _aligned(len(raw))
    return written, offset


def _read_output(region: Region, name: str, tensor: SharedTensor, shape: tuple[int, ...]) -> AnyArray:
    """Copy an output out of the region; raise `ProtocolError` if its shape exceeds the reserved size."""
    dtype = tensor.datatype.numpy
    size_bytes = math.prod(shape) * dtype.itemsize
    if min(shape, default=0) < 0 or size_bytes > tensor.size_bytes:
        raise ProtocolError(f"output '{name}' of shape {list(shape)} does not fit into {tensor.size_bytes} bytes")
    raw = region.memory[tensor.offset : tensor.offset + size_bytes]
    array: AnyArray = raw.view(dtype).reshape(shape).copy()
    return array


def _required_bytes(request: InferRequest, output_sizes: Mapping[str, tuple[int, DType]]) -> int:
    arrays = [array for array in request.inputs.values() if not isinstance(array, SharedTensor)]
    inputs = sum(_aligned(array.nbytes) for array in arrays if array.dtype.kind not in "OSU")
    return inputs + sum(_aligned(size_bytes) for size_bytes, _ in output_sizes.values())


def _aligned(size_bytes: int) -> int:
    return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
