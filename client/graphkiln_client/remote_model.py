"""One model on a server: requests for its metadata and inference requests."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import InvalidInput, ProtocolError
from graphkiln_client.connection import Connection
from graphkiln_client.published import check_config, check_metadata, check_statistics
from graphkiln_client.shared_memory import RegionPool
from graphkiln_client.transports.base import PLAIN, PROCESS, InferRequest, InferResponse, RequestedOutput

_counter = itertools.count(1)
_MAX_DIMENSION = (1 << 31) - 1


def new_request_id() -> str:
    """Return 32 hexadecimal digits: 16 for the process, 16 for the request."""
    return f"{PROCESS.digits()}{next(_counter):016x}"


class RemoteModel:
    """A model on a server. May be shared by tasks and threads; metadata and configuration are cached.

    Args:
        connection: Connection to the server.
        name: Model name.
        version: Version, or empty for the server's choice.
        regions: Shared memory for tensors; None to send tensors in messages.
    """

    def __init__(self, connection: Connection, name: str, version: str, regions: RegionPool | None = None) -> None:
        self.name = name
        self.version = version
        self.connection = connection
        self._regions = regions
        self._metadata: dict[str, Any] | None = None
        self._config: dict[str, Any] | None = None
        self._outputs: frozenset[str] = frozenset()  # in the last response to a request for all outputs

    def sibling(self, name: str) -> RemoteModel:
        """Return a model with the same connection, version and shared memory, and empty caches."""
        return RemoteModel(self.connection, name, self.version, self._regions)

    def forget(self) -> None:
        """Clear the cached metadata and configuration."""
        self._metadata = self._config = None

    async def metadata(self) -> dict[str, Any]:
        """Return the KServe v2 metadata.

        Raises:
            ClientError: The request failed.
        """
        metadata = self._metadata  # another thread may reset it at any time
        if metadata is None:
            call = self.connection.wire.model_metadata(self.name, self.version)
            self._metadata = metadata = check_metadata(await self.connection.call(call))
        return metadata

    async def config(self) -> dict[str, Any]:
        """Return the Triton configuration; empty if the server lacks the extension.

        Raises:
            ClientError: The request failed.
        """
        config = self._config
        if config is None:
            supported = "model_configuration" in await self.connection.extensions()
            call = self.connection.wire.model_config(self.name, self.version)
            self._config = config = check_config(await self.connection.call(call)) if supported else {}
        return config

    async def statistics(self) -> dict[str, Any]:
        """Return the current statistics of this version.

        Raises:
            ClientError: The request failed.
        """
        call = self.connection.wire.model_statistics(self.name, self.version)
        versions = check_statistics(await self.connection.call(call))
        if not versions:
            raise ProtocolError(f"the server's statistics of '{self.name}' are empty")
        return versions[-1]

    async def infer(
        self,
        inputs: Mapping[str, AnyArray],
        outputs: Mapping[str, RequestedOutput],
        request_id: str,
        *,
        contract: str = "",
    ) -> InferResponse:
        """Run the model once.

        Args:
            inputs: Arrays or nested lists by input name.
            outputs: Requested outputs by name; empty for all: those of the metadata, if they are cached, else those of
                the response before, or else any.
            request_id: Id that the server returns and logs.
            contract: Digest of the expected contract; empty to accept any.

        Raises:
            ClientError: The request failed.
            ProtocolError: The response has other outputs.
        """
        request = self._request(inputs, outputs=outputs, request_id=request_id, contract=contract)
        response = await (self._infer_shared(request) if self._regions else self.connection.infer(request))
        if self._is_doubtful(response, request):
            self.forget()  # the model may have been replaced
            if fault := _misfit(response, request, await self.metadata()):
                raise ProtocolError(f"the response of '{self.name}' does not fit its metadata: {fault}")
        if not request.outputs and self._outputs != response.outputs.keys():
            self._outputs = frozenset(response.outputs)  # the names alone: a view of the dict would keep the arrays
        return response

    def _is_doubtful(self, response: InferResponse, request: InferRequest) -> bool:
        """Return true if a response contradicts the cached metadata or, without them, the response before."""
        if self._metadata is not None:
            return bool(_misfit(response, request, self._metadata))
        return bool(self._outputs) and not request.outputs and self._outputs != response.outputs.keys()

    async def encode_once(self, inputs: Mapping[str, AnyArray]) -> Callable[[], Coroutine[Any, Any, InferResponse]]:
        """Encode a request once; the returned function sends it without retries.

        Raises:
            ClientError: The inputs cannot be sent.
        """
        request = self._request(inputs)
        return (lambda: self._infer_shared(request)) if self._regions else await self.connection.encode_once(request)

    def _request(self, inputs: Mapping[str, Any], **options: Any) -> InferRequest:
        arrays = {name: _to_array(name, given) for name, given in inputs.items()}
        return InferRequest(model=self.name, version=self.version, inputs=arrays, **options)

    async def _infer_shared(self, request: InferRequest) -> InferResponse:
        assert self._regions is not None  # noqa: S101 - checked by the callers
        metadata = await self.metadata()
        if not request.outputs:
            names = [row["name"] for row in metadata["outputs"]]
            request = dataclasses.replace(request, outputs=dict.fromkeys(names, PLAIN))
        return await self._regions.infer(request, _output_sizes(metadata, request))


def _misfit(response: InferResponse, request: InferRequest, metadata: Mapping[str, Any]) -> str:
    """Describe how a response contradicts the metadata of its model; empty if it does not."""
    rows = {row["name"]: row for row in metadata["outputs"]}
    if not request.outputs and rows.keys() != response.outputs.keys():
        return f"it has the outputs {', '.join(response.outputs)}, expected {', '.join(rows)}"
    for name, array in response.outputs.items():
        row = rows.get(name)
        if row is None or (name in request.outputs and request.outputs[name].class_count):
            continue
        dtype, shape = DType(row["datatype"]), row["shape"]
        sizes = zip(shape, array.shape, strict=False)
        if array.dtype != dtype.numpy or len(shape) != array.ndim or any(a not in (-1, b) for a, b in sizes):
            return f"output '{name}' is {array.dtype}{list(array.shape)}, expected {dtype.numpy}{shape}"
    return ""


def _output_sizes(metadata: Mapping[str, Any], request: InferRequest) -> dict[str, tuple[int, DType]]:
    """Compute size and datatype of the requested outputs with a static shape except for the batch dimension."""
    batch = next((array.shape[0] for array in request.inputs.values() if array.shape), 1)
    sizes: dict[str, tuple[int, DType]] = {}
    for row in metadata["outputs"]:
        datatype, (first, *rest) = DType(row["datatype"]), row["shape"] or [1]
        if datatype is DType.BYTES or any(size < 0 for size in rest) or row["name"] not in request.outputs:
            continue
        count = int(np.prod([batch if first < 0 else first, *rest], dtype=np.int64))
        sizes[row["name"]] = (count * datatype.numpy.itemsize, datatype)
    return sizes


def _to_array(name: str, value: Any) -> AnyArray:
    """Convert an input to an array; raise `InvalidInput` if that fails or a dimension is too large."""
    try:
        array: AnyArray = np.asarray(value)
        if not array.ndim:
            array = array.reshape(1)  # Triton has no scalars
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise InvalidInput(
            f"input '{name}' is not an array: {str(error)[:200]}",
            hint="pass a numpy array, or nested lists of equal length",
        ) from error
    if 0 < array.size <= _MAX_DIMENSION:
        return array
    # The dimensions of an empty array can have any size; servers multiply those that are not 0.
    elements = max(array.shape) if array.size else math.prod(filter(None, array.shape))
    if elements > _MAX_DIMENSION:
        raise InvalidInput(
            f"input '{name}' has shape {list(array.shape)}, which is too large to send",
            hint=f"a dimension, and the product of the non-zero dimensions of an empty array, is at most "
            f"{_MAX_DIMENSION}",
        )
    return array
