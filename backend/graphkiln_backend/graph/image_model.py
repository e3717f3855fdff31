"""The model beside a model that takes encoded images in the place of its tensor: its name, its input, its parameters.

A model `cats` whose config.pbtxt says `accept_images` is served under its own name, and also as `cats.images`, whose
one input is an encoded image and whose outputs are those of `cats`.
"""

from __future__ import annotations

from graphkiln_backend.graph.errors import RepositoryError

# The key of config.pbtxt's `parameters` that asks for it: `true` or `false`.
ACCEPT_IMAGES = "accept_images"

# The line of config.pbtxt that asks for it.
ACCEPT_IMAGES_LINE = f'parameters {{ key: "{ACCEPT_IMAGES}" value {{ string_value: "true" }} }}'

# The key under which the server publishes the name of the model that takes images, for clients.
IMAGE_MODEL = "image_model"

# The key under which that model says whose images it takes.
TENSOR_MODEL = "tensor_model"

# The key under which it says how large the tensor is that it makes of an image.
IMAGE_SAMPLE_BYTES = "image_sample_bytes"

# Its input: BYTES, an encoded image in each element.
IMAGE_INPUT = "IMAGE"

_SUFFIX = ".images"
_VALUES = {"true": True, "false": False}


def image_model_name(model: str) -> str:
    """Return the name of the model that takes encoded images for another one."""
    return f"{model}{_SUFFIX}"


def accepts_images(value: str) -> bool:
    """Parse a value of `accept_images`; an empty one is false.

    Raises:
        RepositoryError: It is neither `true` nor `false`.
    """
    if value and value not in _VALUES:
        raise RepositoryError(f"parameters: {ACCEPT_IMAGES} must be true or false, got '{value}'")
    return _VALUES.get(value, False)
