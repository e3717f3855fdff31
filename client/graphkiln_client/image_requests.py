"""Requests that are made of images: prepared as the version that answers says, and again where another one does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ModelNotFound, ModelNotReady
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images import decoding
from graphkiln_backend.images.decoding import ImageLike, Prepared, describe, upright_size
from graphkiln_client.connection import Connection
from graphkiln_client.encoded_images import Form, check_form, choose_encoded, download
from graphkiln_client.inference import Inference
from graphkiln_client.metadata import ModelInfo, published_image_model, published_tensor_model
from graphkiln_client.served_version import ServedVersion, StaleVersion, is_contract_changed, read_served_version
from graphkiln_client.transports.base import InferResponse, RequestedOutput

# From an image in any usual form, or its URL where that is allowed, to one sample of an input tensor.


def prepare(image: ImageLike, spec: Preprocess, *, fetch_timeout_s: float | None = None) -> Prepared:
    """Turns an image into one sample (no batch dimension) of the spec's layout and dtype, and keeps the image's size.

    Args:
        image: The image, or the `https://` URL of one.
        spec: How the image becomes a sample.
        fetch_timeout_s: Seconds that fetching a URL may take; None where URLs are not allowed.

    Raises:
        InvalidInput: The image cannot be read.
        ConnectionFailed: The URL's server cannot be reached or trusted.
    """
    if isinstance(image, str) and image.startswith(("https://", "http://")):
        if fetch_timeout_s is None:
            raise InvalidInput(f"{image} is a URL", hint="to fetch images, use Client(fetch_urls=True)")
        content = download(image, fetch_timeout_s)
        try:
            return decoding.prepare(content, spec)
        except InvalidInput as error:
            raise InvalidInput(f"{image}: {error.message}", hint=error.hint) from error
    return decoding.prepare(image, spec)


T = TypeVar("T")

_MOST_VERSIONS = 5  # attempts at an answer that another version gives: more come only from servers that take turns
_BETWEEN_VERSIONS_S = 0.05


class ImageRequests:
    """Sends images to a model. Task-safe; what a version publishes is requested once for each.

    Args:
        connection: To the server.
        info: The model.
        inference: Sends its requests.
        preprocess: In place of the spec that the server publishes.
        fetch_urls: Whether images may be given as `https://` URLs.
        form: How images travel, where that is a question.
    """

    def __init__(
        self,
        connection: Connection,
        info: ModelInfo,
        inference: Inference,
        *,
        preprocess: Preprocess | None,
        fetch_urls: bool,
        form: Form = "auto",
    ) -> None:
        check_form(form)
        self._form = form
        self._connection = connection
        self._info = info
        self._inference = inference
        self._spec = preprocess
        self._served: ServedVersion | None = None
        self._images: Inference | None = None
        self._answered = ""
        self._fetch_timeout_s = connection.timeout_s if fetch_urls else None

    async def preprocess(self) -> Preprocess:
        """The preprocess spec: the given one, or the published one.

        Raises:
            InvalidInput: The model publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        return self.spec_of(await self.served_version()) if self._spec is None else self._spec

    def spec_of(self, served: ServedVersion) -> Preprocess:
        """The preprocess spec for a version: the given one, or its own.

        Raises:
            InvalidInput: The version publishes none.
            ProtocolError: What it publishes is not a spec.
        """
        return self._spec or served.preprocess

    async def served_version(self) -> ServedVersion:
        """What is published about the version that answers; requested once for each.

        Raises:
            InvalidInput: It is a model that stands beside another one, and takes that one's images as they are.
        """
        served = self._served
        if served is None:
            served = await read_served_version(self._info, self._answered)
            if tensor_model := published_tensor_model(served.config):
                raise InvalidInput(
                    f"'{self._info.name}' is the way of encoded images into '{tensor_model}'",
                    hint=f"ask '{tensor_model}': images go this way where that pays, or where --encoded says so",
                )
            self._served = served
        return served

    async def follow(self, ask: Callable[[ServedVersion], Awaitable[T]]) -> T:
        """Asks the version that answers; where it is another by then, that one.

        Args:
            ask: Asks a version; raises `StaleVersion` where another one answered.

        Raises:
            ModelNotReady: Another version answers each time.
        """
        for attempt in range(_MOST_VERSIONS):
            served = await self.served_version()
            try:
                return await ask(served)
            except StaleVersion as stale:
                self._forget(served, stale.answered)
                await self._connection.transport.sleep(attempt * _BETWEEN_VERSIONS_S)
        raise ModelNotReady(
            f"'{self._info.name}' was answered by another version each time, {_MOST_VERSIONS} times in a row",
            hint="name one: model(name, version)",
        )

    async def answer_as_asked(
        self,
        images: Sequence[ImageLike],
        served: ServedVersion,
        ask_encoded: Callable[[Sequence[str], Sequence[bytes]], Awaitable[Sequence[T]]],
        ask: Callable[[Sequence[str], Sequence[Prepared]], Awaitable[Sequence[T]]],
    ) -> list[T | ClientError]:
        """Asks about images in the form in which each of them travels; an image that fails has its error there.

        Args:
            images: The images.
            served: The version that answers.
            ask_encoded: As for `answer_encoded`.
            ask: As for `answer`.

        Raises:
            InvalidInput: The model takes no encoded images, and they were requested to be sent so.
            StaleVersion: Another version answers.
        """
        found = await self.answer_encoded(images, served, ask_encoded)
        rest = [index for index in range(len(images)) if index not in found]
        decoded = await self.answer([images[index] for index in rest], served, ask)
        results = {**found, **dict(zip(rest, decoded, strict=True))}
        return [results[index] for index in range(len(images))]

    async def upright_sizes(self, encoded: Sequence[bytes]) -> list[tuple[int, int]]:
        """Height and width of encoded images, upright.

        Raises:
            InvalidInput: One of them is no image.
        """
        return await self._connection.transport.compute(lambda: [*map(upright_size, encoded)])

    async def answer(
        self,
        images: Sequence[ImageLike],
        served: ServedVersion,
        ask: Callable[[Sequence[str], Sequence[Prepared]], Awaitable[Sequence[T]]],
    ) -> list[T | ClientError]:
        """Prepares images and asks about those of one shape together; an image that fails has its error there.

        Args:
            images: The images.
            served: The version that they are prepared for.
            ask: Gets the names of images and their samples, all of one shape; returns an answer for each.

        Raises:
            StaleVersion: Another version answers.
        """
        spec = self.spec_of(served)
        samples = await self._connection.transport.compute(lambda: [self._load(image, spec) for image in images])
        results: dict[int, T | ClientError] = {}
        by_shape: dict[tuple[int, ...], dict[int, Prepared]] = {}
        for index, sample in enumerate(samples):
            if isinstance(sample, ClientError):
                results[index] = sample
            else:
                by_shape.setdefault(sample.sample.shape, {})[index] = sample
        for group in by_shape.values():
            sources = [describe(images[index]) for index in group]
            try:
                results.update(zip(group, await ask(sources, [*group.values()]), strict=True))
            except ClientError as error:
                results.update(dict.fromkeys(group, error))
        return [results[index] for index in range(len(images))]

    async def answer_encoded(
        self,
        images: Sequence[ImageLike],
        served: ServedVersion,
        ask: Callable[[Sequence[str], Sequence[bytes]], Awaitable[Sequence[T]]],
    ) -> dict[int, T | ClientError]:
        """Asks about images as they are, where the server takes them, and that is worth it or requested.

        Where it refuses a request, its images are left to `answer`, which tells the good from the bad; where they must
        not be decoded here, each is sent alone.

        Args:
            images: The images.
            served: The version that answers.
            ask: As for `answer`, with encoded images.

        Returns:
            Answers by the place of their images; of those that were not sent there is none.

        Raises:
            InvalidInput: The model takes no encoded images, and they were requested to be sent so.
            StaleVersion: Another version answers.
        """
        takes = bool(published_image_model(served.config, expected=self._form == "encoded")) and self._spec is None
        if self._form == "encoded" and not takes:
            raise InvalidInput(
                f"'{self._info.name}' takes no encoded images",
                hint="leave out --encoded, or have its config.pbtxt say accept_images",
            )
        if self._form == "tensor" or not takes:
            return {}
        form, spec, timeout_s = self._form, self.spec_of(served), self._fetch_timeout_s
        encoded = await self._connection.transport.compute(
            lambda: choose_encoded(images, form, spec, fetch_timeout_s=timeout_s)
        )
        return await self._ask_encoded({i: describe(images[i]) for i in encoded}, encoded, ask) if encoded else {}

    async def _ask_encoded(
        self,
        sources: Mapping[int, str],
        encoded: Mapping[int, bytes],
        ask: Callable[[Sequence[str], Sequence[bytes]], Awaitable[Sequence[T]]],
    ) -> dict[int, T | ClientError]:
        try:
            answers = await ask([sources[index] for index in encoded], [*encoded.values()])
            return dict(zip(encoded, answers, strict=True))
        except ClientError as error:
            if self._form == "auto" and isinstance(error, InvalidInput | ModelNotFound | ModelNotReady):
                return {}
            if len(encoded) == 1 or not isinstance(error, InvalidInput):
                return dict.fromkeys(encoded, error)
        results: dict[int, T | ClientError] = {}
        for index, content in encoded.items():
            results |= await self._ask_encoded(sources, {index: content}, ask)
        return results

    async def infer(
        self,
        served: ServedVersion,
        inputs: Mapping[str, AnyArray],
        outputs: Mapping[str, RequestedOutput],
        request_id: str,
        *,
        encoded: bool = False,
    ) -> InferResponse:
        """A response of the version that the request was made for.

        Raises:
            StaleVersion: Another one answers.
        """
        inference = self._encoded_inference(served) if encoded else self._inference
        try:
            response = await inference.infer(inputs, outputs, request_id, contract=served.digest)
        except ClientError as error:
            if is_contract_changed(error) or await self._has_changed(served, error):
                raise StaleVersion from error
            raise
        served.check(response.version)
        return response

    def _encoded_inference(self, served: ServedVersion) -> Inference:
        """The way to the model that takes the images of a version; kept, because shared memory needs its metadata."""
        if self._images is None:
            name = published_image_model(served.config, expected=self._form == "encoded")
            self._images = self._inference.of(ModelInfo(self._connection, name, self._info.version))
        return self._images

    def _forget(self, served: ServedVersion, answered: str) -> None:
        """Has everything requested again, unless another task has seen to it."""
        if self._served is served:
            self._info.forget()
            self._served, self._answered, self._images = None, answered, None

    def _load(self, image: ImageLike, spec: Preprocess) -> Prepared | ClientError:
        try:
            return prepare(image, spec, fetch_timeout_s=self._fetch_timeout_s)
        except ClientError as error:
            return error

    async def _has_changed(self, served: ServedVersion, error: ClientError) -> bool:
        """Whether a server that refuses an input publishes something else by now."""
        if not isinstance(error, InvalidInput) or error.status is None:
            return False
        try:
            info = ModelInfo(self._connection, self._info.name, self._info.version)
            return await read_served_version(info, "") != served
        except ClientError:
            return False


def batch_of(samples: Sequence[AnyArray]) -> AnyArray:
    """One tensor; of a single sample a view, because its copy costs as much as sending it."""
    return np.stack(samples) if len(samples) > 1 else samples[0][np.newaxis]
