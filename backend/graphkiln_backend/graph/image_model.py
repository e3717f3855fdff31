"""The model beside a model that takes encoded images in the place of its tensor: its name, and its input.

A model `cats` whose config.pbtxt says `accept_images` is served under its own name as ever, and beside it stands
`cats.images`, whose one input is an encoded image and whose outputs are those of `cats`.
"""

from __future__ import annotations

from graphkiln_backend.graph.errors import RepositoryError

PARAMETER = "accept_images"
"""The key of config.pbtxt's `parameters` that asks for it: `true` or `false`."""

CONFIG_LINE = f'parameters {{ key: "{PARAMETER}" value {{ string_value: "true" }} }}'
"""The line of config.pbtxt that asks for it."""

PUBLISHED = "image_model"
"""The key under which the server publishes the name of the model that takes images, for clients."""

TENSOR_MODEL = "tensor_model"
"""The key under which that model says whose images it takes."""

SAMPLE_BYTES = "image_sample_bytes"
"""The key under which it says how large the tensor is that it makes of an image."""

INPUT = "IMAGE"
"""Its input: BYTES, an encoded image in each element."""

_SUFFIX = ".images"
_VALUES = {"true": True, "false": False}


def image_model_name(model: str) -> str:
    """What the model is called that takes the images of another one."""
    return f"{model}{_SUFFIX}"


def accepts_images(value: str) -> bool:
    """Whether a value of `accept_images` asks for it; an empty one does not.

    Raises:
        RepositoryError: It is neither `true` nor `false`.
    """
    if value and value not in _VALUES:
        raise RepositoryError(f"parameters: {PARAMETER} must be true or false, got '{value}'")
    return _VALUES.get(value, False)
