"""Client library for image and tensor inference over HTTP or gRPC.

Example: `Client("http://localhost:8000").model("digits").classify("seven.png").top`.

From an image to a labelled answer: `client` (blocking) or `async_client` call `image_requests`, which reads what the
server has `published`, prepares the image (`preparing`), sends it (`remote_model`, `connection`, `transports`) and
reads the outputs (`tasks`).

Public names are imported lazily (PEP 562), so that the command line can read the defaults without importing numpy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphkiln_backend.images.answers import Box, Detection, SegmentedImage
    from graphkiln_backend.images.masks import Mask
    from graphkiln_client.async_client import AsyncClient, AsyncModel
    from graphkiln_client.client import Client, Model
    from graphkiln_client.published import Health, ServedModel
    from graphkiln_client.tasks import Classification, Result

__all__ = [
    "AsyncClient",
    "AsyncModel",
    "Box",
    "Classification",
    "Client",
    "Detection",
    "Health",
    "Mask",
    "Model",
    "Result",
    "SegmentedImage",
    "ServedModel",
]

DEFAULT_URL = "http://localhost:8000"
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MAX_RETRIES = 2

_HOMES = {
    "AsyncClient": f"{__name__}.async_client",
    "AsyncModel": f"{__name__}.async_client",
    "Client": f"{__name__}.client",
    "Mask": "graphkiln_backend.images.masks",
    "Model": f"{__name__}.client",
    **dict.fromkeys(("Health", "ServedModel"), f"{__name__}.published"),
    **dict.fromkeys(("Classification", "Result"), f"{__name__}.tasks"),
    **dict.fromkeys(("Box", "Detection", "SegmentedImage"), "graphkiln_backend.images.answers"),
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the public names."""
    return __all__
