"""Inference requests of one model: their ids, and their way, in messages or through shared memory."""

from __future__ import annotations

import dataclasses
import itertools
import math
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client.connection import Connection
from graphkiln_client.metadata import ModelInfo
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports.base import PLAIN, InferRequest, InferResponse, RequestedOutput

_PROCESS = uuid.uuid4().hex[:16]
_counter = itertools.count(1)
_MOST = (1 << 31) - 1  # elements of a dimension


def new_request_id() -> str:
    """32 hexadecimal digits: the first half differs between processes, the second between requests."""
    return f"{_PROCESS}{next(_counter):016x}"


def _to_arrays(inputs: Mapping[str, Any]) -> dict[str, AnyArray]:
    """What a request can carry.

    Raises:
        InvalidInput: numpy makes no array of an input, or one of a shape that ends a server: Triton (24.10) multiplies
            dimensions in 64 bits and aborts where that overflows, also where one of them is 0.
    """
    arrays: dict[str, AnyArray] = {}
    for name, given in inputs.items():
        try:
            array = arrays[name] = np.atleast_1d(np.asarray(given))  # Triton has no scalars: [1] stands for []
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise InvalidInput(
                f"input '{name}' is no array: {str(error)[:200]}",
                hint="give a numpy array, or nested lists of one depth",
            ) from error
        if _is_absurd(array):
            raise InvalidInput(
                f"input '{name}' cannot be sent: its shape is {list(array.shape)}, and servers multiply dimensions",
                hint=f"a dimension is {_MOST} at most; all of an empty array together, too",
            )
    return arrays


def _is_absurd(array: AnyArray) -> bool:
    """Whether no server could hold an array of that shape, if it held anything."""
    if array.size:
        return max(array.shape, default=0) > _MOST
    return math.prod(filter(None, array.shape)) > _MOST


class Inference:
    """Sends the inference requests of one model. Task-safe.

    Args:
        connection: To the server.
        info: The model.
        regions: Where tensors travel through shared memory; None where they travel in messages.
    """

    def __init__(self, connection: Connection, info: ModelInfo, regions: RegionPool | None) -> None:
        self._connection = connection
        self._info = info
        self._regions = regions

    def of(self, info: ModelInfo) -> Inference:
        """The same way to another model."""
        return Inference(self._connection, info, self._regions)

    async def infer(
        self,
        inputs: Mapping[str, AnyArray],
        outputs: Mapping[str, RequestedOutput],
        request_id: str,
        *,
        contract: str = "",
    ) -> InferResponse:
        """Runs the model once.

        Args:
            inputs: Arrays, or what numpy makes one of, by input name.
            outputs: The requested outputs; empty for all.
            request_id: Echoed by the server and shown in its logs.
            contract: Digest of the contract that the request is made for; empty for whichever holds.

        Raises:
            ClientError: The request failed.
        """
        request = InferRequest(
            model=self._info.name,
            version=self._info.version,
            inputs=_to_arrays(inputs),
            outputs=outputs,
            request_id=request_id,
            contract=contract,
        )
        if self._regions is None:
            return await self._connection.infer(request)
        return await self._infer_shared(self._regions, request)

    async def prepare(self, inputs: Mapping[str, AnyArray]) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """Encodes a request once; what it returns sends it, without retries.

        Args:
            inputs: As for `infer`.

        Raises:
            ClientError: The inputs cannot be sent.
        """
        request = InferRequest(model=self._info.name, version=self._info.version, inputs=_to_arrays(inputs))
        if self._regions is None:
            return await self._connection.prepare(request)
        regions = self._regions
        return lambda: self._infer_shared(regions, request)

    async def _infer_shared(self, regions: RegionPool, request: InferRequest) -> InferResponse:
        if not request.outputs:
            names = [row["name"] for row in (await self._info.metadata())["outputs"]]
            request = dataclasses.replace(request, outputs=dict.fromkeys(names, PLAIN))
        return await regions.infer(request, await self._output_sizes(request))

    async def _output_sizes(self, request: InferRequest) -> dict[str, tuple[int, DType]]:
        """Bytes of the requested outputs whose shape follows from the metadata and the batch."""
        batch = next((array.shape[0] for array in request.inputs.values() if array.shape), 1)
        sizes: dict[str, tuple[int, DType]] = {}
        for row in (await self._info.metadata())["outputs"]:
            datatype, (first, *rest) = DType(row["datatype"]), row["shape"] or [1]
            if datatype is DType.BYTES or any(size < 0 for size in rest) or row["name"] not in request.outputs:
                continue
            count = int(np.prod([batch if first < 0 else first, *rest], dtype=np.int64))
            sizes[row["name"]] = (count * datatype.numpy.itemsize, datatype)
        return sizes
