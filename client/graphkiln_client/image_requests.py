"""Image requests: from images to labelled answers.

`ImageRequests.answer` takes these steps:

1. Read what the server publishes about the model version: `published.ServedVersion`, cached.
2. Prepare the images: keep them encoded, or decode them to tensors: `preparing`.
3. Send one request for each tensor shape: `remote_model`, `connection`, `transports`. The URL of the client decided
   between HTTP and gRPC (`client.open_blocking`, `async_client.open_async`).
4. Read the outputs of each image: `tasks`.

Failures are handled at three levels:

- `Connection` retries connection failures, overload and "not ready" errors.
- `_send_encoded`: if the server rejects encoded images, they are decoded here and sent as tensors. If the caller
  requires encoded images, they are sent again one by one.
- `answer`: each request carries the digest of the version's contract. If the version was replaced in the meantime,
  graphkiln's instances reject the request. Triton's other backends answer it: the response names another version, whose
  published contract is compared here. In both cases the images are prepared again for the new contract. For servers
  without contracts, a change of the version number in the response triggers the same.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import numpy as np

from graphkiln_backend.graph.contract import ContractChanged
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ClientError,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    ProtocolError,
)
from graphkiln_backend.graph.image_model import IMAGE_INPUT
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import ImageLike, Prepared, describe, upright_size
from graphkiln_client.preparing import Form, prepare, to_tensor
from graphkiln_client.published import ALL_CLASSES, Labels, ServedVersion, published_tensor_model
from graphkiln_client.remote_model import RemoteModel, new_request_id
from graphkiln_client.tasks import ImageTask, Reply, parse_labels
from graphkiln_client.transports.base import PLAIN, InferResponse, RequestedOutput

T = TypeVar("T")

_MAX_ATTEMPTS = 5  # more contract changes in a row mean that several servers alternate behind one address
_RETRY_DELAY_S = 0.05


class _StaleVersionError(Exception):
    """The server replaced the version that the request was prepared for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Images of one request.

    Attributes:
        indices: Positions in the caller's list of images.
        batched: True if each output has one row per image.
        encoded: True if the images are sent encoded.
        sizes: Height and width of each upright image; empty if the task does not need them.
    """

    indices: Sequence[int]
    inputs: Mapping[str, AnyArray]
    batched: bool
    encoded: bool
    sizes: Sequence[tuple[int, int]]


class ImageRequests:
    """Image requests to one model. May be shared by tasks and threads; published metadata is cached per version.

    Args:
        remote: The model.
        preprocess: Overrides the published preprocess spec.
        labels: Overrides the server's labels; by class index.
        fetch_urls: Allow `https://` URLs as images.
        form: Encoding of the images in requests.
    """

    def __init__(
        self,
        remote: RemoteModel,
        *,
        preprocess: Preprocess | None,
        labels: Sequence[str] | None,
        fetch_urls: bool,
        form: Form,
    ) -> None:
        if form not in get_args(Form):
            raise InvalidInput(f"images must be 'auto', 'encoded' or 'tensor', got '{form}'")
        self._remote = remote
        self._transport = remote.connection.transport
        self._preprocess = preprocess
        self._labels: Labels | None = None if labels is None else tuple(labels)
        self._fetch_timeout_s = remote.connection.timeout_s if fetch_urls else None
        self._form = form
        self._served: ServedVersion | None = None
        self._image_model: RemoteModel | None = None

    async def preprocess(self) -> Preprocess:
        """Return the overriding or the published preprocess spec.

        Raises:
            InvalidInput: The model publishes no preprocess spec.
            ProtocolError: The published spec is malformed.
        """
        return self._preprocess or (await self._served_version()).preprocess

    async def max_batch_size(self, task: ImageTask[T]) -> int:
        """Return the maximum number of images in one request.

        Raises:
            InvalidInput: The model takes no images, or has another task.
        """
        served = await self._served_version()
        _check(served, task)
        return served.max_batch_size

    async def answer(self, images: Sequence[ImageLike], task: ImageTask[T]) -> list[T | ClientError]:
        """Answer a task for each image, with one request per tensor shape. Errors of single images are returned.

        Args:
            images: At most `max_batch_size` images; the error of more is returned for each of them.
            task: The task.

        Raises:
            InvalidInput: The model takes no images, or has another task.
            ModelNotReady: The server keeps rejecting the contract that it publishes, or answering with another.
        """
        for attempt in range(_MAX_ATTEMPTS):
            served = await self._served_version()
            try:
                return await self._answer_for(served, images, task)
            except _StaleVersionError:
                if self._served is served:  # otherwise another caller has reset it
                    self._remote.forget()
                    self._served, self._image_model = None, None
                await self._transport.sleep(attempt * _RETRY_DELAY_S)
        raise ModelNotReady(
            f"'{self._remote.name}' rejected {_MAX_ATTEMPTS} requests in a row for the contract that it publishes, or "
            "answered them with versions of other contracts",
            hint="request a loaded version with model(name, version), and check that the URL leads to a single server",
        )

    async def _answer_for(
        self, served: ServedVersion, images: Sequence[ImageLike], task: ImageTask[T]
    ) -> list[T | ClientError]:
        _check(served, task)
        if len(images) > served.max_batch_size:
            too_many = InvalidInput(
                f"'{self._remote.name}' takes {served.max_batch_size} images at once, got {len(images)}",
                hint="classify_many, detect_many, ... split images into requests",
            )
            return [too_many] * len(images)
        answers: dict[int, T | ClientError] = {}
        prepared = await self._prepare(served, images, dict(enumerate(images)), self._accepted_form(served))
        if encoded := {index: image for index, image in prepared.items() if isinstance(image, bytes)}:
            encoded_answers = await self._send_encoded(served, images, task, encoded)
            answers.update(encoded_answers)
            rejected = {index: content for index, content in encoded.items() if index not in answers}
            prepared |= await self._prepare(served, images, rejected, "tensor")
        by_shape: dict[tuple[int, ...], dict[int, Prepared]] = {}
        for index, image in prepared.items():
            if isinstance(image, ClientError):
                answers[index] = image
            elif isinstance(image, Prepared):
                by_shape.setdefault(image.sample.shape, {})[index] = image
        for group in by_shape.values():
            try:
                group_answers = await self._send(served, images, task, _tensor_batch(served, group))
                answers.update(group_answers)
            except ClientError as error:
                answers.update(dict.fromkeys(group, error))
        return [answers[index] for index in range(len(images))]

    def _accepted_form(self, served: ServedVersion) -> Form:
        if self._form == "encoded" and self._preprocess is not None:
            raise InvalidInput(
                "the server preprocesses encoded images, so that preprocess= has no effect on them",
                hint="omit preprocess= or images='encoded'",
            )
        if served.image_model(expected=self._form == "encoded") and self._preprocess is None:
            return self._form
        if self._form == "encoded":
            raise InvalidInput(
                f"'{self._remote.name}' does not accept encoded images",
                hint="omit images='encoded' (--encoded), or set accept_images in the model's config.pbtxt",
            )
        return "tensor"

    async def _prepare(
        self, served: ServedVersion, images: Sequence[ImageLike], selected: Mapping[int, ImageLike], form: Form
    ) -> dict[int, bytes | Prepared | ClientError]:
        """Prepare images by index; unreadable images map to their error."""

        def prepare_one(index: int, image: ImageLike) -> bytes | Prepared | ClientError:
            try:
                name = describe(images[index])
                return prepare(image, served.preprocess, form, name=name, fetch_timeout_s=self._fetch_timeout_s)
            except ClientError as error:
                return error

        if not selected:
            return {}
        return await self._transport.compute(lambda: {index: prepare_one(index, selected[index]) for index in selected})

    async def _send_encoded(
        self, served: ServedVersion, images: Sequence[ImageLike], task: ImageTask[T], encoded: Mapping[int, bytes]
    ) -> Mapping[int, T | ClientError]:
        """Answer a task for encoded images.

        Returns:
            Answers by index. Empty if the server rejects the images and they may be sent as tensors instead.
        """
        try:
            sizes: Sequence[tuple[int, int]] = []
            if task.in_pixels:
                sizes = await self._transport.compute(lambda: [*map(upright_size, encoded.values())])
            # The input of encoded images has a batch dimension if Triton adds one (`max_batch_size`). Outputs have one
            # if the tensor model's input does, whether declared in the shape or added by Triton.
            batch = _Batch(
                indices=[*encoded],
                inputs={IMAGE_INPUT: to_tensor(encoded.values(), batch_dimension=served.is_batching)},
                batched=served.takes_several,
                encoded=True,
                sizes=sizes,
            )
            return await self._send(served, images, task, batch)
        except ClientError as error:
            if self._form == "auto" and isinstance(error, InvalidInput | ModelNotFound | ModelNotReady):
                return {}
            if len(encoded) == 1 or not isinstance(error, InvalidInput):
                return dict.fromkeys(encoded, error)
        answers: dict[int, T | ClientError] = {}
        for index, content in encoded.items():  # one damaged image must not fail the others
            answer = await self._send_encoded(served, images, task, {index: content})
            answers.update(answer)
        return answers

    async def _send(
        self, served: ServedVersion, images: Sequence[ImageLike], task: ImageTask[T], batch: _Batch
    ) -> Mapping[int, T]:
        """Send one request and read the answer for each image.

        Raises:
            ClientError: The request failed, or its outputs do not fit the task.
            _StaleVersionError: The version was replaced.
        """
        names, request_id = task.outputs(served), new_request_id()
        started = time.perf_counter()
        response = await self._infer(served, batch, dict.fromkeys(names, PLAIN), request_id)
        latency_ms = (time.perf_counter() - started) * 1e3
        columns = [split_samples(response, name, len(batch.indices), batched=batch.batched) for name in names]
        for name in task.labelled_outputs(served):
            if served.known_labels(name) is None:
                served.labels[name] = await self._fetch_labels(served, batch, name)
        reply = Reply(
            sources=[describe(images[index]) for index in batch.indices],
            sizes=batch.sizes,
            samples=[dict(zip(names, rows, strict=True)) for rows in zip(*columns, strict=True)],
            model=served.model if batch.encoded else response.model,
            version=response.version,
            request_id=request_id,
            latency_ms=latency_ms,
        )
        return dict(zip(batch.indices, task.read(served, reply), strict=True))

    async def _fetch_labels(self, served: ServedVersion, batch: _Batch, output: str) -> Labels:
        """Fetch the labels of an output with the classification extension, for the first image of a batch.

        The extension is not used for scores: it rounds them to six decimals, leaves the order of ties undefined, and
        cannot rank 16-bit floats.
        """
        # The request keeps its batch dimension of 1; Triton's response is a list of classes either way.
        first = {name: tensor[:1] if batch.batched else tensor for name, tensor in batch.inputs.items()}
        one = _Batch(indices=batch.indices[:1], inputs=first, batched=False, encoded=batch.encoded, sizes=[])
        requested = {output: RequestedOutput(class_count=ALL_CLASSES)}
        response = await self._infer(served, one, requested, new_request_id())
        (classes,) = split_samples(response, output, 1, batched=False)
        return parse_labels(classes)

    async def _infer(
        self, served: ServedVersion, batch: _Batch, outputs: Mapping[str, RequestedOutput], request_id: str
    ) -> InferResponse:
        """Run the model, or its companion model for encoded images.

        Raises:
            ClientError: The request failed.
            _StaleVersionError: The version was replaced.
        """
        remote = self._remote
        if batch.encoded:
            # Kept between requests, because shared memory needs its metadata.
            self._image_model = remote = self._image_model or remote.sibling(
                served.image_model(expected=self._form == "encoded")
            )
        try:
            response = await remote.infer(batch.inputs, outputs, request_id, contract=served.digest)
        except InvalidInput as error:
            if ContractChanged.MARK in error.message or await self._has_changed(served, error):
                raise _StaleVersionError from error
            raise
        if not served.digest:
            served.responding.add(response.version)
            if len(served.responding) > 1:
                raise _StaleVersionError
        if not served.fits(response.version):
            raise _StaleVersionError
        return response

    async def _has_changed(self, served: ServedVersion, error: InvalidInput) -> bool:
        """Check whether the server publishes a different version now.

        Needed because Triton rejects shapes by its configuration before the backend compares contracts.
        """
        if error.status is None:
            return False
        try:
            return await self._read(self._remote.sibling(self._remote.name)) != served
        except ClientError:
            return False

    async def _served_version(self) -> ServedVersion:
        served = self._served  # another thread may reset it at any time
        if served is None:
            served = await self._read(self._remote)
            if tensor_model := published_tensor_model(served.config):
                raise InvalidInput(
                    f"'{self._remote.name}' takes encoded images on behalf of '{tensor_model}'",
                    hint=f"use '{tensor_model}': the client sends encoded images if that is faster or with --encoded",
                )
            self._served = served
        return served

    async def _read(self, remote: RemoteModel) -> ServedVersion:
        return ServedVersion.read(
            remote.name,
            remote.version,
            await remote.metadata(),
            await remote.config(),
            preprocess=self._preprocess,
            labels=self._labels,
        )


def _check(served: ServedVersion, task: ImageTask[T]) -> None:
    """Raise `InvalidInput` if a version takes no images or has another task."""
    _ = task.outputs(served), served.image_input, served.preprocess


def _tensor_batch(served: ServedVersion, group: Mapping[int, Prepared]) -> _Batch:
    """Build one request from samples of the same shape."""
    row = served.image_input
    samples = [each.sample for each in group.values()]
    # Unlike `takes_several`, this also handles input ranks that no image batch has: the server rejects those.
    batched = len(row["shape"]) == samples[0].ndim + 1
    # A single sample is sent as a view: a copy takes as long as sending it.
    stacked = np.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]
    return _Batch(
        indices=[*group],
        inputs={row["name"]: stacked if batched else samples[0]},
        batched=batched,
        encoded=False,
        sizes=[(each.height, each.width) for each in group.values()],
    )


def split_samples(response: InferResponse, output: str, count: int, *, batched: bool) -> Sequence[AnyArray]:
    """Split an output into the samples of `count` images; without `batched`, the output is one sample.

    Raises:
        ProtocolError: The output is missing, or has a different number of samples.
    """
    if output not in response.outputs:
        raise ProtocolError(f"the response lacks output '{output}'")
    array = response.outputs[output]
    if not batched:
        return [array]
    if array.ndim < 1 or len(array) != count:
        raise ProtocolError(f"output '{output}' has shape {list(array.shape)} for {count} images")
    return list(array)
