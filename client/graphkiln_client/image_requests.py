"""Requests that are made of images, from the images to labelled answers.

    published version    `published`       what the server says of images, classes and the task; once for each version
    prepared images      `preparing`       encoded as they are, or decoded to samples (`images.decoding`)
    request              `remote_model`    through `connection` (deadline, retries) and a transport: `transports`
    answers              `tasks`           outputs of each image, ranked or placed, with labels: `results`

Three recoveries are on this way, the innermost first:

- `Connection` sends a request again after a failure that may pass: no connection, overload, not ready.
- `_ask_encoded`, where the server refuses encoded images: they are decoded here and sent as tensors; or, where the
  caller wants them encoded, one by one.
- `answer`, where the version was replaced since its contract was read: every request holds the digest of that
  contract, the server refuses it where another contract holds by now, and the images are prepared again for that.
  Where a server publishes no contracts, the number of the version that answers tells.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import numpy as np

from graphkiln_backend.graph.contract import ContractChanged
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotFound, ModelNotReady, ProtocolError
from graphkiln_backend.graph.image_model import IMAGE_INPUT
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import ImageLike, Prepared, describe, upright_size
from graphkiln_client.preparing import Form, prepare, to_tensor
from graphkiln_client.published import ALL_CLASSES, Labels, ServedVersion, parse_labels, published_tensor_model
from graphkiln_client.remote_model import RemoteModel, new_request_id
from graphkiln_client.tasks import ImageTask, Reply
from graphkiln_client.transports.base import PLAIN, InferResponse, RequestedOutput

T = TypeVar("T")

_MOST_VERSIONS = 5  # attempts where the contract changes: more come only from servers that take turns
_BETWEEN_VERSIONS_S = 0.05


class _StaleVersion(Exception):
    """Another version answers, or refuses, than the one that a request was made for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Batch:
    """Images that go into one request.

    Attributes:
        indices: Their places among the caller's images.
        inputs: Input tensors by name.
        batched: True if each output has a row for each image.
        encoded: True if the images are sent encoded.
        sizes: Height and width of each upright image; empty where the task needs none.
    """

    indices: Sequence[int]
    inputs: Mapping[str, AnyArray]
    batched: bool
    encoded: bool
    sizes: Sequence[tuple[int, int]]


class ImageRequests:
    """The image requests of one model. Task-safe; what a version publishes is requested once for each.

    Args:
        remote: The model.
        preprocess: In place of the spec that the server publishes.
        labels: In place of the labels that the server knows; by class index.
        fetch_urls: Allow `https://` URLs of images.
        form: How images travel.
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
        self._answering = ""  # the version that has answered since `_served` was read
        self._image_model: RemoteModel | None = None

    async def preprocess(self) -> Preprocess:
        """The preprocess spec: the given one, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: It is malformed.
        """
        return self._preprocess or (await self._served_version()).preprocess

    async def max_batch_size(self, task: ImageTask[T]) -> int:
        """Most images in one request.

        Raises:
            InvalidInput: The model takes no images, or has another task.
        """
        served = await self._served_version()
        _check(served, task)
        return served.max_batch_size

    async def answer(self, images: Sequence[ImageLike], task: ImageTask[T]) -> list[T | ClientError]:
        """Answer about images in as few requests as their shapes allow; an image that fails has its error there.

        Raises:
            InvalidInput: The model takes no images, or has another task.
            ModelNotReady: The server refuses requests by the contract that it publishes, each time.
        """
        for attempt in range(_MOST_VERSIONS):
            served = await self._served_version()
            try:
                return await self._answer_for(served, images, task)
            except _StaleVersion:
                if self._served is served:  # else another task has seen to it
                    self._remote.forget()
                    self._served, self._image_model, self._answering = None, None, ""
                await self._transport.sleep(attempt * _BETWEEN_VERSIONS_S)
        raise ModelNotReady(
            f"'{self._remote.name}' refused requests by the contract that it publishes, {_MOST_VERSIONS} in a row",
            hint="name a version that is served: model(name, version); is there one server behind the address?",
        )

    async def _answer_for(
        self, served: ServedVersion, images: Sequence[ImageLike], task: ImageTask[T]
    ) -> list[T | ClientError]:
        _check(served, task)
        answers: dict[int, T | ClientError] = {}
        prepared = await self._prepare(served, images, dict(enumerate(images)), self._accepted_form(served))
        if encoded := {index: image for index, image in prepared.items() if isinstance(image, bytes)}:
            by_index = await self._ask_encoded(served, images, task, encoded)
            answers.update(by_index)
            refused = {index: content for index, content in encoded.items() if index not in answers}
            prepared |= await self._prepare(served, images, refused, "tensor")
        by_shape: dict[tuple[int, ...], dict[int, Prepared]] = {}
        for index, image in prepared.items():
            if isinstance(image, ClientError):
                answers[index] = image
            elif isinstance(image, Prepared):
                by_shape.setdefault(image.sample.shape, {})[index] = image
        for group in by_shape.values():
            try:
                of_group = await self._ask(served, images, task, _tensor_batch(served, group))
                answers.update(of_group)
            except ClientError as error:
                answers.update(dict.fromkeys(group, error))
        return [answers[index] for index in range(len(images))]

    def _accepted_form(self, served: ServedVersion) -> Form:
        """The form in which images may travel to a version.

        Raises:
            InvalidInput: The caller wants images to be sent encoded, and the model takes none.
        """
        if served.image_model(expected=self._form == "encoded") and self._preprocess is None:
            return self._form
        if self._form == "encoded":
            raise InvalidInput(
                f"'{self._remote.name}' takes no encoded images",
                hint="leave out --encoded, or have its config.pbtxt say accept_images",
            )
        return "tensor"

    async def _prepare(
        self, served: ServedVersion, images: Sequence[ImageLike], chosen: Mapping[int, ImageLike], form: Form
    ) -> dict[int, bytes | Prepared | ClientError]:
        """Prepare images, given by their index, for sending; one that cannot be read has its error there."""

        def prepare_one(index: int, image: ImageLike) -> bytes | Prepared | ClientError:
            try:
                name = describe(images[index])
                return prepare(image, served.preprocess, form, name=name, fetch_timeout_s=self._fetch_timeout_s)
            except ClientError as error:
                return error

        if not chosen:
            return {}
        return await self._transport.compute(lambda: {index: prepare_one(index, chosen[index]) for index in chosen})

    async def _ask_encoded(
        self, served: ServedVersion, images: Sequence[ImageLike], task: ImageTask[T], encoded: Mapping[int, bytes]
    ) -> Mapping[int, T | ClientError]:
        """Answers about encoded images; none where the server refuses them and they can be decoded here instead.

        Decoding here tells good images from damaged ones. Where the caller wants them encoded, each is sent alone.
        """
        try:
            sizes: Sequence[tuple[int, int]] = []
            if task.in_pixels:
                sizes = await self._transport.compute(lambda: [*map(upright_size, encoded.values())])
            # The input of encoded images has a batch dimension where Triton adds one: `max_batch_size`. The outputs are
            # those of the tensor model: they have one where its tensor has, be it declared or added.
            batch = _Batch(
                indices=[*encoded],
                inputs={IMAGE_INPUT: to_tensor(encoded.values(), batch_dimension=served.is_batching)},
                batched=served.takes_several,
                encoded=True,
                sizes=sizes,
            )
            return await self._ask(served, images, task, batch)
        except ClientError as error:
            if self._form == "auto" and isinstance(error, InvalidInput | ModelNotFound | ModelNotReady):
                return {}
            if len(encoded) == 1 or not isinstance(error, InvalidInput):
                return dict.fromkeys(encoded, error)
        answers: dict[int, T | ClientError] = {}
        for index, content in encoded.items():
            alone = await self._ask_encoded(served, images, task, {index: content})
            answers.update(alone)
        return answers

    async def _ask(
        self, served: ServedVersion, images: Sequence[ImageLike], task: ImageTask[T], batch: _Batch
    ) -> Mapping[int, T]:
        """Send one request, and read the answer about each of its images.

        Raises:
            ClientError: The request failed, or its outputs do not fit the task.
            _StaleVersion: Another contract holds.
        """
        names, request_id = task.outputs(served), new_request_id()
        begun = time.perf_counter()
        response = await self._infer(served, batch, dict.fromkeys(names, PLAIN), request_id)
        latency_ms = (time.perf_counter() - begun) * 1e3
        columns = [split_samples(response, name, len(batch.indices), batched=batch.batched) for name in names]
        await self._learn_labels(served, batch, task)
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

    async def _learn_labels(self, served: ServedVersion, batch: _Batch, task: ImageTask[T]) -> None:
        """Request the labels that the task needs and no contract names: once per version, kept in `served.labels`."""
        for name in task.labelled_outputs(served):
            if served.known_labels(name) is None:
                served.labels[name] = await self._request_labels(served, batch, name)

    async def _request_labels(self, served: ServedVersion, batch: _Batch, output: str) -> Labels:
        """Labels of an output by the classification extension, for one image of a batch.

        The extension is not used for the scores themselves: it writes them with six decimals, leaves the order of ties
        open, and cannot rank 16-bit floats.
        """
        first = {name: tensor[:1] if batch.batched else tensor for name, tensor in batch.inputs.items()}
        one = _Batch(indices=batch.indices[:1], inputs=first, batched=False, encoded=batch.encoded, sizes=[])
        requested = {output: RequestedOutput(class_count=ALL_CLASSES)}
        response = await self._infer(served, one, requested, new_request_id())
        (classes,) = split_samples(response, output, 1, batched=False)
        return parse_labels(classes)

    async def _infer(
        self, served: ServedVersion, batch: _Batch, outputs: Mapping[str, RequestedOutput], request_id: str
    ) -> InferResponse:
        """Run the model, or the one that takes its encoded images, by the contract that a request was made for.

        Raises:
            ClientError: The request failed.
            _StaleVersion: Another contract holds.
        """
        remote = self._remote
        if batch.encoded:
            # Kept, because shared memory needs its metadata.
            self._image_model = remote = self._image_model or remote.beside(
                served.image_model(expected=self._form == "encoded")
            )
        try:
            response = await remote.infer(batch.inputs, outputs, request_id, contract=served.digest)
        except InvalidInput as error:
            if ContractChanged.MARK in error.message or await self._has_changed(served, error):
                raise _StaleVersion from error
            raise
        if not served.digest and self._served is served:
            if self._answering not in {"", response.version}:
                raise _StaleVersion
            self._answering = response.version
        return response

    async def _has_changed(self, served: ServedVersion, error: InvalidInput) -> bool:
        """True if a server that refuses an input publishes something else by now.

        Triton compares shapes with its configuration before the backend compares contracts.
        """
        if error.status is None:
            return False
        try:
            return await self._read(self._remote.beside(self._remote.name)) != served
        except ClientError:
            return False

    async def _served_version(self) -> ServedVersion:
        """The version that answers, as it is published; requested once for each.

        Raises:
            InvalidInput: The model takes the encoded images of another model.
        """
        if self._served is None:
            served = await self._read(self._remote)
            if tensor_model := published_tensor_model(served.config):
                raise InvalidInput(
                    f"'{self._remote.name}' takes encoded images for '{tensor_model}'",
                    hint=f"ask '{tensor_model}': images go this way where that pays, or where --encoded says so",
                )
            self._served = served
            return served
        return self._served

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
    """Check that a version takes images, and has a task's outputs.

    Raises:
        InvalidInput: It does not.
    """
    _ = task.outputs(served), served.image_input, served.preprocess  # each raises


def _tensor_batch(served: ServedVersion, group: Mapping[int, Prepared]) -> _Batch:
    """Samples of one shape as one request."""
    row = served.image_input
    samples = [each.sample for each in group.values()]
    # As `takes_several`, except for inputs of a rank that no batch of images has: the server refuses those by itself.
    batched = len(row["shape"]) == samples[0].ndim + 1
    return _Batch(
        indices=[*group],
        inputs={row["name"]: _stacked(samples) if batched else samples[0]},
        batched=batched,
        encoded=False,
        sizes=[(each.height, each.width) for each in group.values()],
    )


def _stacked(samples: Sequence[AnyArray]) -> AnyArray:
    """One tensor; of a single sample a view, because its copy costs as much as sending it."""
    return np.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]


def split_samples(response: InferResponse, output: str, count: int, *, batched: bool) -> Sequence[AnyArray]:
    """Split an output into samples.

    Args:
        response: The response.
        output: Name of the output.
        count: How many samples were sent.
        batched: True if it has a row for each of them.

    Raises:
        ProtocolError: The output is missing, or has another number of samples.
    """
    if output not in response.outputs:
        raise ProtocolError(f"the response lacks output '{output}'")
    array = response.outputs[output]
    if not batched:
        return [array]
    if array.ndim < 1 or len(array) != count:
        raise ProtocolError(f"output '{output}' has the shape {list(array.shape)} for {count} images")
    return list(array)
