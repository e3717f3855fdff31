"""From an image in any usual form, or its URL where that is allowed, to one sample of an input tensor."""

from __future__ import annotations

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images import decoding
from graphkiln_backend.images.decoding import ImageLike, Prepared
from graphkiln_client.download import download


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
