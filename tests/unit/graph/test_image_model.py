"""The companion model for encoded images: its name, and the parameter that enables it."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.image_model import accepts_images, image_model_name
from graphkiln_backend.graph.text import fault_in_served_name


def test_image_model_name() -> None:
    assert image_model_name("cats") == "cats.images"
    assert not fault_in_served_name(image_model_name("cats"))


@pytest.mark.parametrize(("value", "accepts"), [("true", True), ("false", False), ("", False)])
def test_accepts_images(value: str, accepts: bool) -> None:
    assert accepts_images(value) is accepts


def test_invalid_value() -> None:
    with pytest.raises(RepositoryError, match="accept_images must be true or false, got 'yes'"):
        accepts_images("yes")
