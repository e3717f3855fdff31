"""Inference requests of one model: their ids, and their way, in messages or through shared memory."""

from __future__ import annotations

import dataclasses
import itertools
import uuid
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_client.connection import Connection
from graphkiln_client.model_info import ModelInfo
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports.base import PLAIN, InferRequest, InferResponse, RequestedOutput

_PROCESS = uuid.uuid4().hex[:16]
_counter = itertools.count(1)


def new_request_id() -> str:
    """32 hexadecimal digits: the first half differs between processes, the second between requests."""
    return f"{_PROCESS}{next(_counter):016x}"


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
            inputs={name: np.asarray(array) for name, array in inputs.items()},
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
        arrays = {name: np.asarray(array) for name, array in inputs.items()}
        request = InferRequest(model=self._info.name, version=self._info.version, inputs=arrays)
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
