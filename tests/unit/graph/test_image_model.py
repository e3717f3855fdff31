"""The name of the model that takes images, and how config.pbtxt asks for it."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.image_model import accepts_images, image_model_name
from graphkiln_backend.graph.text import fault_in_served_name


def test_its_name_can_be_served() -> None:
    assert image_model_name("cats") == "cats.images"
    assert not fault_in_served_name(image_model_name("cats"))


@pytest.mark.parametrize(("value", "accepts"), [("true", True), ("false", False), ("", False)])
def test_the_value_decides(value: str, accepts: bool) -> None:
    assert accepts_images(value) is accepts


def test_another_value_is_refused() -> None:
    with pytest.raises(RepositoryError, match="accept_images must be true or false, got 'yes'"):
        accepts_images("yes")
