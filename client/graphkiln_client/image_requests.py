"""Image requests: from images to labelled answers.

`ImageRequests.answer` takes these steps:

1. Read what the server publishes about the model version: `remote_model.ServedVersion`, cached.
2. Prepare the images: keep them encoded, or decode them to tensors (`prepare`).
3. Send one request for each tensor shape: `remote_model`, `connection`, `transports`.
4. Read the outputs of each image: `tasks`.

Failures are handled at three levels:

- `Connection` retries connection failures, overload and "not ready" errors.
- `_send_encoded`: if the server rejects encoded images, they are decoded here and sent as tensors. If the caller
  requires encoded images, they are sent again one by one.
- `answer`: each request carries the digest of the version's contract. The server rejects it if the version was replaced
  in the meantime, and the images are prepared again for the new contract. For servers without contracts, a change of
  the version number in the response triggers the same.
"""

from __future__ import annotations

import http.client
import math
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar, get_args
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import (
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
)

import numpy as np

from graphkiln_backend.graph.contract import ContractChanged
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    InvalidInput,
    ModelNotFound,
    ModelNotReady,
    ProtocolError,
)
from graphkiln_backend.graph.files import MIB, read_bytes
from graphkiln_backend.graph.image_model import IMAGE_INPUT
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images import decoding
from graphkiln_backend.images.decoding import ImageLike, Prepared, describe, upright_size
from graphkiln_client.remote_model import (
    ALL_CLASSES,
    Labels,
    RemoteModel,
    ServedVersion,
    new_request_id,
    published_tensor_model,
)
from graphkiln_client.tasks import Classification, ImageTask, Reply
from graphkiln_client.transports.base import PLAIN, Deadline, InferResponse, RequestedOutput

T = TypeVar("T")

# Send images encoded if that is smaller and the server accepts it, always, or never.
Form: TypeAlias = Literal["auto", "encoded", "tensor"]

_MAX_ATTEMPTS = 5  # more contract changes in a row mean that several servers alternate behind one address
_RETRY_DELAY_S = 0.05
_FILE_LIMIT = 64 * MIB  # larger files exceed the message limit of most servers and are decoded here
_DOWNLOAD_LIMIT = 64 * MIB
# Limits of the highest class index: some labels may be missing, but a corrupt index must not allocate gigabytes.
_MAX_MISSING_LABELS, _MAX_LABEL_SPARSITY = 1 << 16, 4


class _StaleVersion(Exception):
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
    """Image requests to one model. Task-safe; published metadata is cached per version.

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
        self._responding_version = ""  # since `_served` was read
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

        Raises:
            InvalidInput: The model takes no images, or has another task.
            ModelNotReady: The server keeps rejecting the contract that it publishes.
        """
        for attempt in range(_MAX_ATTEMPTS):
            served = await self._served_version()
            try:
                return await self._answer_for(served, images, task)
            except _StaleVersion:
                if self._served is served:  # otherwise another task has reset it
                    self._remote.forget()
                    self._served, self._image_model, self._responding_version = None, None, ""
                await self._transport.sleep(attempt * _RETRY_DELAY_S)
        raise ModelNotReady(
            f"'{self._remote.name}' rejected {_MAX_ATTEMPTS} requests in a row for the contract that it publishes",
            hint="request a loaded version with model(name, version), and check that the URL leads to a single server",
        )

    async def _answer_for(
        self, served: ServedVersion, images: Sequence[ImageLike], task: ImageTask[T]
    ) -> list[T | ClientError]:
        _check(served, task)
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
        if served.image_model(expected=self._form == "encoded") and self._preprocess is None:
            return self._form
        if self._form == "encoded":
            raise InvalidInput(
                f"'{self._remote.name}' does not accept encoded images",
                hint="omit --encoded, or set accept_images in the model's config.pbtxt",
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
            _StaleVersion: The version was replaced.
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
            _StaleVersion: The version was replaced.
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
                raise _StaleVersion from error
            raise
        if not served.digest and self._served is served:
            if self._responding_version not in {"", response.version}:
                raise _StaleVersion
            self._responding_version = response.version
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
        if self._served is None:
            served = await self._read(self._remote)
            if tensor_model := published_tensor_model(served.config):
                raise InvalidInput(
                    f"'{self._remote.name}' takes encoded images on behalf of '{tensor_model}'",
                    hint=f"use '{tensor_model}': the client sends encoded images if that is faster or with --encoded",
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
    """Raise `InvalidInput` if a version takes no images or has another task."""
    _ = task.outputs(served), served.image_input, served.preprocess


def prepare(
    image: ImageLike, spec: Preprocess, form: Form = "tensor", *, name: str = "", fetch_timeout_s: float | None = None
) -> bytes | Prepared:
    """Convert an image to the content of a request.

    Args:
        image: The image, or an `https://` URL.
        spec: The preprocess spec.
        form: Encoding in the request. Pixels and unreadable files are never sent encoded.
        name: Name of the image in errors; defaults to its path, its URL, or its type and size.
        fetch_timeout_s: Timeout in seconds of a download; None if URLs are not allowed.

    Returns:
        The encoded image; or one sample without a batch dimension, in the layout and dtype of the spec.

    Raises:
        InvalidInput: The image cannot be read.
        ConnectionFailed: The download failed.
        DeadlineExceeded: The download took too long.
    """
    name = name or describe(image)
    content = image
    if isinstance(image, str) and image.startswith(("https://", "http://")):
        if fetch_timeout_s is None:
            raise InvalidInput(f"{image} is a URL", hint="to fetch images, use Client(fetch_urls=True)")
        content = download(image, fetch_timeout_s)
    elif form != "tensor" and isinstance(image, str | Path):
        with suppress(OSError):  # decoding it raises the error
            content = read_bytes(image, _FILE_LIMIT)
    if isinstance(content, bytes) and (form == "encoded" or (form == "auto" and _is_smaller_encoded(content, spec))):
        return content
    return decoding.prepare(content, spec, name=name)


def _is_smaller_encoded(encoded: bytes, spec: Preprocess) -> bool:
    """Compare an encoded image with its tensor; True if the tensor's size depends on the image."""
    fixed = spec.resize if isinstance(spec.resize, tuple) else None
    size = spec.letterbox.size if spec.letterbox else spec.crop or fixed
    return size is None or len(encoded) < math.prod(size) * spec.channels * spec.dtype.bytes


class _HttpsRedirects(HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: PLR0917
        if urlsplit(newurl).scheme != "https":
            fp.close()
            raise InvalidInput(f"{req.full_url} redirects to {newurl}, which is not https://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def download(url: str, timeout_s: float) -> bytes:
    """Download an `https://` URL. Redirects must lead to `https://` URLs, too.

    Raises:
        InvalidInput: The URL is not `https://`, the server returns an error, or the content is over 64 MiB.
        ConnectionFailed: The server cannot be reached or trusted.
        DeadlineExceeded: The download takes longer than `timeout_s`.
    """
    if urlsplit(url).scheme != "https":
        raise InvalidInput(f"{url} is not an https:// URL")
    # urllib's default opener would also follow redirects to http:// and ftp://.
    opener = OpenerDirector()
    for handler in (ProxyHandler, HTTPSHandler, _HttpsRedirects, HTTPErrorProcessor, HTTPDefaultErrorHandler):
        opener.add_handler(handler())
    try:
        with opener.open(url, timeout=timeout_s) as response:
            content = _read_body(response, url, Deadline.after(timeout_s))
            missing_bytes = response.length or 0  # read1 reports no error for an incomplete body
    except HTTPError as error:
        error.close()
        raise InvalidInput(f"cannot fetch {url}: the server returned {error.code}", status=error.code) from error
    except (OSError, http.client.HTTPException) as error:
        raise ConnectionFailed(f"cannot fetch {url}: {error}") from error
    if len(content) > _DOWNLOAD_LIMIT:
        raise InvalidInput(f"{url} is larger than {_DOWNLOAD_LIMIT // MIB} MiB")
    if missing_bytes:
        raise ConnectionFailed(f"cannot fetch {url}: the connection closed {missing_bytes} bytes before the end")
    return content


def _read_body(response: Any, url: str, deadline: Deadline) -> bytes:
    """Read a body until its end, the deadline, or one byte beyond the size limit."""
    content = bytearray()
    while len(content) <= _DOWNLOAD_LIMIT and (piece := response.read1(_DOWNLOAD_LIMIT + 1 - len(content))):
        content += piece
        if not deadline.remaining_s:
            raise DeadlineExceeded(f"{url} was not downloaded within {deadline.timeout_s:g} s")
    return bytes(content)


def to_tensor(encoded: Collection[bytes], *, batch_dimension: bool) -> AnyArray:
    """Build the input of encoded images: BYTES `[images, 1]`, or `[images]` without a batch dimension."""
    elements = np.empty(len(encoded), dtype=object)
    elements[:] = [*encoded]
    return elements.reshape(-1, 1) if batch_dimension else elements


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


def parse_labels(output: AnyArray) -> Labels:
    """Parse labels by class index from a classification output with all classes.

    Args:
        output: BYTES `[classes]`, or `[batch, classes]`, of which the first row is read.

    Raises:
        ProtocolError: The output is malformed.
    """
    elements = output[0].ravel() if output.ndim > 1 and len(output) else output.ravel()
    parsed = [Classification.parse(bytes(element).decode("utf-8", "replace")) for element in elements]
    labels = {entry.index: entry.label for entry in parsed}
    limit = max(_MAX_MISSING_LABELS, _MAX_LABEL_SPARSITY * len(elements))
    if labels and not 0 <= min(labels) <= max(labels) < limit:
        invalid = min(labels) if min(labels) < 0 else max(labels)
        raise ProtocolError(f"the server returned class index {invalid}, expected 0 to {limit - 1}")
    return tuple(labels.get(index, "") for index in range(max(labels, default=-1) + 1))
