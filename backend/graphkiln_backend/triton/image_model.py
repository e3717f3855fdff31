"""Model class of `NAME.images`: takes encoded images and has the tensor model compute them.

Runs inside Triton's Python stub and holds no graph. The images of all requests that Triton hands over are decoded at
once; those that become samples of one shape are sent together to the tensor model inside the server (business logic
scripting), in a request for each of its instances, and a fault of an image is an error of its own request. While the
tensor model computes, another instance decodes the next images: the two stages overlap.

Samples go to the version of the same number, with the contract that they were prepared for: a version never computes
what another one's preprocessing made.

Source: Triton Python backend, "Business Logic Scripting".
"""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any, TypeAlias

import numpy as np
import triton_python_backend_utils as pb_utils

from graphkiln_backend.graph.contract import CONTRACTS, REQUEST_PARAMETER, Contract, Contracts
from graphkiln_backend.graph.dtypes import AnyArray, DType
from graphkiln_backend.graph.errors import ExecutionError, GraphkilnError, InvalidInput, ModelNotFound, ModelNotReady
from graphkiln_backend.graph.image_model import IMAGE_INPUT, TENSOR_MODEL
from graphkiln_backend.graph.preprocess import PREPROCESS, Preprocess
from graphkiln_backend.graph.text import bounded
from graphkiln_backend.images.encoded import Decoder
from graphkiln_backend.repository.config import ModelConfigProto, parse_json
from graphkiln_backend.repository.image_config import TENSOR_INPUT, is_stacked, parts_of
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.triton.environment import lift_memory_limit
from graphkiln_backend.triton.executor import (
    CANCELLATION_CHECK_S,
    Cancelled,
    InferenceRequest,
    OutOfMemory,
    Outputs,
    Result,
    check_contract,
    split_batch,
)
from graphkiln_backend.triton.features import Feature, TritonFeatures
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.metrics import ImageMetrics
from graphkiln_backend.triton.responses import FAILURES, to_response
from graphkiln_backend.triton.sent_models import note_sent
from graphkiln_backend.triton.tensors import to_array

_NICENESS = 5  # where decoding and computing share cores, a session that has its samples goes first

Ask = Callable[[AnyArray, tuple[str, ...]], Outputs]  # computes outputs of samples, or raises a `GraphkilnError`
_Samples: TypeAlias = dict[int, AnyArray]  # by the request's index

_log = logging.getLogger("graphkiln.triton")


class TritonPythonModel:
    """One instance of the model that takes images for one version of another model.

    Source: Triton Python backend, "Usage".
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read how images become samples.

        Raises:
            TritonModelException: The published contract cannot be read.
        """
        lift_memory_limit()
        note_sent(args["model_repository"])
        log_to_triton(args["model_name"])
        os.nice(_NICENESS)
        try:
            config = parse_json(args["model_config"])
            self._tensor_model = TensorModel(config, int(args["model_version"]))
            self._decoder = Decoder(self._tensor_model.preprocess, threads=usable_cores())
        except GraphkilnError as error:
            raise pb_utils.TritonModelException(bounded(f"{args['model_name']}: {error}")) from error
        parts = parts_of(config)
        self._asking = ThreadPoolExecutor(parts, thread_name_prefix="graphkiln-ask")
        self._executor = ImageExecutor(
            self._decoder,
            self._tensor_model.ask,
            outputs=[*self._tensor_model.output_types],
            batching=config.max_batch_size > 0,
            stacked=is_stacked(config),
            contract=self._tensor_model.contract.digest if self._tensor_model.contract else "",
            asking=self._asking,
            parts=parts,
        )
        self._metrics = ImageMetrics(
            args["model_instance_name"],
            args["model_name"],
            args["model_version"],
            FAILURES.counts,
            self._decoder.seconds,
        )
        if not TritonFeatures.of_this_stub().has(Feature.TEXTS_IN_CPP):
            from graphkiln_backend.triton.text_shapes import protect_texts

            pb_utils.deserialize_bytes_tensor = protect_texts(pb_utils.deserialize_bytes_tensor)
        gc.freeze()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Compute a response for every request; an error in one request is in its response only.

        Args:
            requests: `pb_utils.InferenceRequest`s.

        Returns:
            One `pb_utils.InferenceResponse` per request, in order.
        """
        return list(map(to_response, self._executor.execute_batch(requests), requests))

    def finalize(self) -> None:
        """End the threads."""
        self._metrics.close()
        self._decoder.close()
        self._asking.shutdown()


class ImageExecutor:
    """Execute requests with encoded images. Not thread-safe; does not own the decoder.

    Args:
        decoder: Turns images into samples.
        ask: Has the tensor model compute.
        outputs: The tensor model's outputs, in order.
        batching: Whether requests may be computed together.
        stacked: Whether the tensor model takes several images at once; otherwise a request holds one.
        contract: Digest of the version's contract; requests made for another are refused. Empty: not checked.
        asking: Threads that send the parts of a batch at the same time; without them it is sent as a whole.
        parts: Instances of the tensor model that compute at the same time.
    """

    def __init__(
        self,
        decoder: Decoder,
        ask: Ask,
        *,
        outputs: Sequence[str],
        batching: bool,
        stacked: bool = True,
        contract: str = "",
        asking: Executor | None = None,
        parts: int = 1,
    ) -> None:
        self._decoder = decoder
        self._ask = ask
        self._outputs = tuple(outputs)
        self._batching = batching
        self._stacked = stacked
        self._contract = contract
        self._asking = asking
        self._parts = parts

    def execute_batch(self, requests: Sequence[InferenceRequest]) -> list[Result]:
        """Execute requests.

        Returns:
            One result per request, in order.
        """
        results: dict[int, Result] = {}
        images: dict[int, list[bytes]] = {}
        for index, request in enumerate(requests):
            try:
                images[index] = self._read(request)
            except Exception as error:  # noqa: BLE001 - any error becomes the result of its request
                results[index] = _as_result(error)
        begun = time.monotonic()
        samples = self._decode(images, results)
        if time.monotonic() - begun > CANCELLATION_CHECK_S:
            _drop_cancelled(requests, samples, results)
        names = {index: self._requested(requests[index]) for index in samples}
        for group in self._groups(samples):
            results.update(self._ask_in_parts({index: samples[index] for index in group}, names))
        return [results[index] for index in range(len(requests))]

    def _read(self, request: InferenceRequest) -> list[bytes]:
        """Read the encoded images of a request."""
        if self._contract:
            check_contract(request.parameters(), self._contract)
        for tensor in request.inputs():
            if tensor.name() == IMAGE_INPUT:
                return [bytes(element) for element in tensor.as_numpy().reshape(-1)]
        raise InvalidInput(f"the request has no input '{IMAGE_INPUT}'")

    def _requested(self, request: InferenceRequest) -> tuple[str, ...]:
        requested = request.requested_output_names()
        return tuple(name for name in self._outputs if name in requested)

    def _decode(self, images: Mapping[int, list[bytes]], results: dict[int, Result]) -> dict[int, AnyArray]:
        """Decode to samples by request; errors become results."""
        found: dict[int, AnyArray] = {}
        try:
            decoded = self._decoder.decode([*images.values()])
        except Exception as error:  # noqa: BLE001 - no single image is at fault
            results.update(dict.fromkeys(images, _as_result(error)))
            return found
        for index, samples in zip(images, decoded, strict=True):
            if isinstance(samples, InvalidInput):
                results[index] = samples
            elif not self._stacked and len(samples) > 1:
                results[index] = InvalidInput(f"the model takes one image, the request has {len(samples)}")
            else:
                found[index] = samples
        return found

    def _groups(self, samples: Mapping[int, AnyArray]) -> list[list[int]]:
        """Indices of the requests that are computed together: their samples have one shape."""
        if not self._batching:
            return [[index] for index in samples]
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, array in samples.items():
            groups.setdefault(array.shape[1:], []).append(index)
        return [*groups.values()]

    def _ask_in_parts(self, samples: Mapping[int, AnyArray], names: Mapping[int, tuple[str, ...]]) -> dict[int, Result]:
        """Compute samples of one shape, in as many requests as there are instances."""
        parts = _parts_of(samples, self._parts)
        if self._asking is None or len(parts) == 1:
            return self._ask_together(samples, names)
        others = [self._asking.submit(self._ask_together, part, names) for part in parts[1:]]
        results = self._ask_together(parts[0], names)
        for part in others:
            results.update(part.result())
        return results

    def _ask_together(self, samples: Mapping[int, AnyArray], names: Mapping[int, tuple[str, ...]]) -> dict[int, Result]:
        """Compute samples of one shape at once; when that fails, those of each request alone."""
        union = tuple(name for name in self._outputs if any(name in names[index] for index in samples))
        try:
            if len(samples) == 1:
                ((index, array),) = samples.items()
                return {index: self._ask(array if self._stacked else array[0], union)}
            outputs = self._ask(np.concatenate([*samples.values()]), union)
            parts = split_batch(outputs, [len(array) for array in samples.values()])
            return {
                index: {name: part[name] for name in names[index]} for index, part in zip(samples, parts, strict=True)
            }
        except Exception as error:  # noqa: BLE001 - the request at fault fails again, alone
            if len(samples) == 1:
                return dict.fromkeys(samples, _as_result(error))
        return {
            index: result
            for each, array in samples.items()
            for index, result in self._ask_together({each: array}, names).items()
        }


def _drop_cancelled(requests: Sequence[InferenceRequest], samples: _Samples, results: dict[int, Result]) -> None:
    """Drop requests that were cancelled meanwhile."""
    for index in [index for index in samples if requests[index].is_cancelled()]:
        results[index] = Cancelled("the client cancelled the request before it was computed")
        del samples[index]


def _parts_of(samples: Mapping[int, AnyArray], count: int) -> list[dict[int, AnyArray]]:
    """Split requests in their order into parts of about equally many images; few requests give fewer parts."""
    parts: list[dict[int, AnyArray]] = [{} for _ in range(count)]
    total, begun = sum(map(len, samples.values())), 0
    for index, array in samples.items():
        parts[begun * count // total][index] = array
        begun += len(array)
    return [part for part in parts if part]


def _as_result(error: Exception) -> GraphkilnError:
    if isinstance(error, GraphkilnError):
        return error
    if isinstance(error, MemoryError):
        return OutOfMemory(f"there is not enough memory for this request: {error}")
    _log.error("a request with images failed unexpectedly", exc_info=error)
    return ExecutionError(f"unexpected {type(error).__name__}: {error}")


class TensorModel:
    """Version of the model that computes the samples.

    Args:
        config: Configuration of the model that takes images.
        version: Number of both versions.

    Attributes:
        contract: Published contract of the version, or None.
        preprocess: How images become samples.
        output_types: Type of each output, in order.

    Raises:
        ManifestError: The published contract cannot be read.
        InvalidInput: No preprocessing is published.
    """

    def __init__(self, config: ModelConfigProto, version: int) -> None:
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        self._name, self._version, self._input = parameters[TENSOR_MODEL], version, parameters[TENSOR_INPUT]
        self.contract = _contract(parameters, version)
        self.preprocess = self.contract.preprocess if self.contract and self.contract.preprocess else _spec(parameters)
        self.output_types = {output.name: DType.from_config(output.data_type) for output in config.output}

    def ask(self, samples: AnyArray, outputs: tuple[str, ...]) -> Outputs:
        """Have the version compute some outputs of samples.

        Raises:
            GraphkilnError: The request failed; the class follows Triton's code.
        """
        response = pb_utils.InferenceRequest(
            model_name=self._name,
            model_version=self._version,
            requested_output_names=list(outputs),
            inputs=[pb_utils.Tensor(self._input, samples)],
            parameters={REQUEST_PARAMETER: self.contract.digest} if self.contract else {},
        ).exec()
        if response.has_error():
            raise _read_error(response.error())
        tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
        return {name: to_array(tensors[name], self.output_types[name]) for name in outputs}


def _contract(parameters: dict[str, str], version: int) -> Contract | None:
    return Contracts.from_json(parameters[CONTRACTS]).find(str(version)) if CONTRACTS in parameters else None


def _spec(parameters: dict[str, str]) -> Preprocess:
    if PREPROCESS not in parameters:
        raise InvalidInput("this version publishes no preprocessing, so an image cannot become its input")
    return Preprocess.from_json(parameters[PREPROCESS])


def _read_error(error: Any) -> GraphkilnError:
    """Translate an error of the tensor model by its code."""
    codes = pb_utils.TritonError
    kinds: dict[Any, type[GraphkilnError]] = {
        codes.INVALID_ARG: InvalidInput,
        codes.NOT_FOUND: ModelNotFound,
        codes.UNAVAILABLE: ModelNotReady,
        codes.CANCELLED: Cancelled,
    }
    return kinds.get(error.code(), ExecutionError)(error.message())
