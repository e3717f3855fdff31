"""Arrays of texts that a stub is about to give the shape of a request."""

from __future__ import annotations

import numpy as np
import pytest

from graphkiln_backend.triton.text_shapes import protect_texts


class TestTexts:
    words = np.array([b"a", b"b"], np.object_)

    @pytest.mark.parametrize("shape", [[2], [1, 2], (2, 1)])
    def test_they_get_the_shape_of_the_request(self, shape: list[int]) -> None:
        shaped = protect_texts(lambda _: self.words)(np.zeros(2, np.uint8)).reshape(shape)
        assert type(shaped) is np.ndarray
        assert shaped.shape == tuple(shape)
        assert shaped.ravel().tolist() == [b"a", b"b"]

    def test_they_are_empty_where_they_cannot_have_it(self) -> None:
        shaped = protect_texts(lambda _: self.words[:0])(np.zeros(0, np.uint8)).reshape([4, 2**62])
        assert shaped.shape == (0, 0, 0)
