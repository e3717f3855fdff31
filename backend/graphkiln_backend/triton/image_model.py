"""Model class of `NAME.images`: decode images and send them to the tensor model.

Runs inside Triton's Python stub and has no graph. The images of all requests in a batch are decoded at once. Samples of
one shape are sent together to the tensor model inside the server (business logic scripting), split into one request per
instance; a damaged image is an error of its own request only. While the tensor model computes, another instance decodes
the next images.

Samples go to the version of the same number, with the contract that they were prepared for, so that a version never
computes samples of another version's preprocessing.

Source: Triton Python backend, "Business Logic Scripting".
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
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
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.triton.environment import instances_folder, lift_memory_limit
from graphkiln_backend.triton.executor import (
    CANCELLATION_CHECK_S,
    Cancelled,
    InferenceRequest,
    Outputs,
    Result,
    check_contract,
    split_batch,
    to_result,
)
from graphkiln_backend.triton.features import Feature, TritonFeatures
from graphkiln_backend.triton.log import log_to_triton
from graphkiln_backend.triton.metrics import ImageMetrics
from graphkiln_backend.triton.request_notes import DeadlyRequest, Feeds, RequestNotes
from graphkiln_backend.triton.responses import FAILURES, to_response
from graphkiln_backend.triton.tensors import to_array

_NICENESS = 5  # if decoding and computing share cores, computing goes first

Infer = Callable[[AnyArray, tuple[str, ...]], Outputs]  # computes outputs of samples, or raises a `GraphkilnError`
_Samples: TypeAlias = dict[int, AnyArray]  # by index of the request
_Images: TypeAlias = dict[int, list[bytes]]  # encoded


class TritonPythonModel:
    """One instance of a model that decodes images for one version of the tensor model.

    Source: Triton Python backend, "Usage".
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the preprocessing, and start the decoder.

        Raises:
            TritonModelException: The published contract cannot be read.
        """
        lift_memory_limit()
        log_to_triton(args["model_name"])
        os.nice(_NICENESS)
        try:
            config = parse_json(args["model_config"])
            self._tensor_model = TensorModel(config, int(args["model_version"]))
            self._decoder = Decoder(self._tensor_model.preprocess, threads=usable_cores())
        except GraphkilnError as error:
            raise pb_utils.TritonModelException(bounded(f"{args['model_name']}: {error}")) from error
        self._executor = ImageExecutor(
            self._decoder,
            self._tensor_model.infer,
            outputs=[*self._tensor_model.output_types],
            batching=config.max_batch_size > 0,
            stacked=is_stacked(config),
            contract=self._tensor_model.contract.digest if self._tensor_model.contract else "",
            parts=parts_of(config),
        )
        if folder := instances_folder():
            name, version = args["model_name"], args["model_version"]
            computed_by = f"{name} {version} {self._tensor_model.preprocess}"
            self._executor.notes = RequestNotes(folder, args["model_instance_name"], os.getpid(), computed_by)
        self._metrics = ImageMetrics(
            args["model_instance_name"],
            args["model_name"],
            args["model_version"],
            FAILURES.counts,
            self._decoder.seconds,
        )
        if not TritonFeatures.of_this_stub().has(Feature.TEXTS_IN_CPP):
            from graphkiln_backend.triton.oversized_shapes import protect_texts

            pb_utils.deserialize_bytes_tensor = protect_texts(pb_utils.deserialize_bytes_tensor)
        gc.freeze()

    def execute(self, requests: list[Any]) -> list[Any]:
        """Compute a response for every request; an error of one request affects only its own response.

        Args:
            requests: `pb_utils.InferenceRequest`s.

        Returns:
            One `pb_utils.InferenceResponse` per request, in order.
        """
        return list(map(to_response, self._executor.execute_batch(requests), requests))

    def finalize(self) -> None:
        """Stop the threads."""
        if self._executor.notes:
            self._executor.notes.close()
        self._metrics.close()
        self._decoder.close()
        self._executor.close()


class ImageExecutor(Closeable):
    """Execute requests with encoded images. Not thread-safe; does not own the decoder.

    Args:
        decoder: Decodes images to samples.
        infer: Computes samples on the tensor model.
        outputs: The tensor model's outputs, in order.
        batching: Requests may be computed together.
        stacked: The tensor model accepts several images at once; otherwise a request has one image.
        contract: Digest of the version's contract; requests for another contract are refused. Empty: not checked.
        parts: Instances of the tensor model: a batch is split into as many simultaneous requests.

    Attributes:
        notes: Notes the requests under way; None if no supervisor reads them.
    """

    def __init__(
        self,
        decoder: Decoder,
        infer: Infer,
        *,
        outputs: Sequence[str],
        batching: bool,
        stacked: bool = True,
        contract: str = "",
        parts: int = 1,
    ) -> None:
        self.notes: RequestNotes | None = None
        self._decoder = decoder
        self._infer = infer
        self._outputs = tuple(outputs)
        self._batching = batching
        self._stacked = stacked
        self._contract = contract
        self._parts = parts
        self._threads = ThreadPoolExecutor(parts, thread_name_prefix="graphkiln-infer")

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()

    def execute_batch(self, requests: Sequence[InferenceRequest]) -> list[Result]:
        """Execute requests.

        Returns:
            One result per request, in order.
        """
        results: dict[int, Result] = {}
        images: _Images = {}
        for index, request in enumerate(requests):
            try:
                images[index] = self._read(request)
            except Exception as error:  # noqa: BLE001 - any error becomes the result of its request
                results[index] = to_result(error, request)
        for group in self._separate_suspects(images):
            results.update(self._execute_noted(requests, group))
        return [results[index] for index in range(len(requests))]

    def _separate_suspects(self, images: _Images) -> list[_Images]:
        """Separate requests that may have ended an instance: each is computed alone."""
        notes = self.notes
        alone = [index for index in images if notes.is_known(_noted(images[index]))] if notes else []
        together = {index: images[index] for index in images if index not in alone}
        return [*([together] if together else []), *({index: images[index]} for index in alone)]

    def _execute_noted(self, requests: Sequence[InferenceRequest], images: _Images) -> dict[int, Result]:
        if self.notes is None:
            return self._execute(requests, images)
        try:
            self.notes.begin([_noted(each) for each in images.values()])
        except DeadlyRequest as error:
            return dict.fromkeys(images, error)
        results = self._execute(requests, images)
        if not any(isinstance(result, ExecutionError) for result in results.values()):
            self.notes.end()  # otherwise they may have ended an instance of the tensor model
        return results

    def _execute(self, requests: Sequence[InferenceRequest], images: _Images) -> dict[int, Result]:
        results: dict[int, Result] = {}
        begun = time.monotonic()
        samples = self._decode(images, results)
        if time.monotonic() - begun > CANCELLATION_CHECK_S:
            _drop_cancelled(requests, samples, results)
        names = {index: self._requested(requests[index]) for index in samples}
        for group in self._groups(samples):
            results.update(self._infer_in_parts({index: samples[index] for index in group}, names))
        return results

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

    def _decode(self, images: _Images, results: dict[int, Result]) -> dict[int, AnyArray]:
        """Decode the images to samples by request; add errors to the results."""
        decoded: dict[int, AnyArray] = {}
        try:
            outcomes = self._decoder.decode([*images.values()])
        except Exception as error:  # noqa: BLE001 - not caused by a single image
            results.update(dict.fromkeys(images, to_result(error)))
            return decoded
        for index, samples in zip(images, outcomes, strict=True):
            if isinstance(samples, InvalidInput):
                results[index] = samples
            elif not self._stacked and len(samples) > 1:
                results[index] = InvalidInput(f"the model accepts one image, but the request has {len(samples)}")
            else:
                decoded[index] = samples
        return decoded

    def _groups(self, samples: Mapping[int, AnyArray]) -> list[list[int]]:
        """Group the indices of requests whose samples have one shape."""
        if not self._batching:
            return [[index] for index in samples]
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, array in samples.items():
            groups.setdefault(array.shape[1:], []).append(index)
        return [*groups.values()]

    def _infer_in_parts(self, samples: _Samples, names: Mapping[int, tuple[str, ...]]) -> dict[int, Result]:
        """Compute samples of one shape, in one request per instance of the tensor model."""
        first, *others = _split(samples, self._parts)
        pending = [self._threads.submit(self._infer_together, part, names) for part in others]
        results = self._infer_together(first, names)
        for part in pending:
            results.update(part.result())
        return results

    def _infer_together(self, samples: _Samples, names: Mapping[int, tuple[str, ...]]) -> dict[int, Result]:
        """Compute samples of one shape together; if that fails, those of each request alone."""
        union = tuple(name for name in self._outputs if any(name in names[index] for index in samples))
        try:
            if len(samples) == 1:
                ((index, array),) = samples.items()
                return {index: self._infer(array if self._stacked else array[0], union)}
            outputs = self._infer(np.concatenate([*samples.values()]), union)
            parts = split_batch(outputs, [len(array) for array in samples.values()])
            return {
                index: {name: part[name] for name in names[index]} for index, part in zip(samples, parts, strict=True)
            }
        except Exception as error:  # noqa: BLE001 - the request at fault fails again, alone
            if len(samples) == 1:
                return dict.fromkeys(samples, to_result(error))
        results: dict[int, Result] = {}
        for index, array in samples.items():
            results.update(self._infer_together({index: array}, names))
        return results


def _noted(images: list[bytes]) -> Feeds:
    return {IMAGE_INPUT: np.array(images, np.object_)}


def _drop_cancelled(requests: Sequence[InferenceRequest], samples: _Samples, results: dict[int, Result]) -> None:
    """Drop requests that were cancelled during decoding."""
    for index in [index for index in samples if requests[index].is_cancelled()]:
        results[index] = Cancelled("the client cancelled the request before it was computed")
        del samples[index]


def _split(samples: _Samples, count: int) -> list[_Samples]:
    """Split requests in order into at most `count` non-empty parts of about equally many images."""
    parts: list[_Samples] = [{} for _ in range(count)]
    total, begun = sum(map(len, samples.values())), 0
    for index, array in samples.items():
        parts[begun * count // total][index] = array
        begun += len(array)
    return [part for part in parts if part]


class TensorModel:
    """Client of the tensor model's version inside the server.

    Args:
        config: Configuration of the model that decodes images.
        version: Number of both versions.

    Attributes:
        contract: Published contract of the version, or None.
        preprocess: Conversion of images to samples.
        output_types: Type of each output, in order.

    Raises:
        ManifestError: The published contract cannot be read.
        InvalidInput: No preprocessing is published.
    """

    def __init__(self, config: ModelConfigProto, version: int) -> None:
        parameters = {key: value.string_value for key, value in config.parameters.items()}
        self._name, self._version, self._input = parameters[TENSOR_MODEL], version, parameters[TENSOR_INPUT]
        self.contract: Contract | None = None
        if CONTRACTS in parameters:
            self.contract = Contracts.from_json(parameters[CONTRACTS]).find(str(version))
        if self.contract and self.contract.preprocess:
            self.preprocess = self.contract.preprocess
        elif PREPROCESS in parameters:
            self.preprocess = Preprocess.from_json(parameters[PREPROCESS])
        else:
            raise InvalidInput("this version publishes no preprocessing, so that it cannot accept images")
        self.output_types = {output.name: DType.from_config(output.data_type) for output in config.output}

    def infer(self, samples: AnyArray, outputs: tuple[str, ...]) -> Outputs:
        """Compute some outputs of samples.

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
