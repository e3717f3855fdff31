"""The companion model for encoded images: its name, its input, and the parameters of config.pbtxt that concern it.

If config.pbtxt of a model `cats` has `accept_images`, the server also serves `cats.images`, whose only input is an
encoded image and whose outputs are those of `cats`.
"""

from __future__ import annotations

from graphkiln_backend.graph.errors import RepositoryError

# Keys of config.pbtxt's `parameters`.
ACCEPT_IMAGES = "accept_images"  # `true` or `false`
IMAGE_MODEL = "image_model"  # name of the companion model, published for clients
TENSOR_MODEL = "tensor_model"  # of the companion model: the model behind it
IMAGE_SAMPLE_BYTES = "image_sample_bytes"  # of the companion model: size of a decoded sample

# The line of config.pbtxt that enables the companion model.
ACCEPT_IMAGES_LINE = f'parameters {{ key: "{ACCEPT_IMAGES}" value {{ string_value: "true" }} }}'

# Input of the companion model: BYTES, an encoded image in each element.
IMAGE_INPUT = "IMAGE"

_SUFFIX = ".images"
_VALUES = {"true": True, "false": False}


def image_model_name(model: str) -> str:
    """Return the name of a model's companion model."""
    return f"{model}{_SUFFIX}"


def is_image_model(name: str) -> bool:
    """True for the name of a companion model."""
    return name.endswith(_SUFFIX)


def accepts_images(value: str) -> bool:
    """Parse a value of `accept_images`; an empty one is false.

    Raises:
        RepositoryError: It is neither `true` nor `false`.
    """
    if value and value not in _VALUES:
        raise RepositoryError(f"parameters: {ACCEPT_IMAGES} must be true or false, got '{value}'")
    return _VALUES.get(value, False)
