"""Which images are sent as they are."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_client.encoded_images import check_form, choose_encoded, is_worth_sending, read_encoded, to_tensor

SPEC = Preprocess(crop=(2, 2))  # 48 bytes in FP32


@pytest.mark.parametrize(
    ("spec", "size_bytes"),
    [
        (SPEC, 48),
        (Preprocess(crop=(2, 2), dtype=DType.UINT8), 12),
        (Preprocess(resize=(2, 3), color="L"), 24),
        (Preprocess(letterbox=Letterbox(size=(2, 2))), 48),
    ],
)
def test_what_is_smaller_than_its_sample_is_sent(spec: Preprocess, size_bytes: int) -> None:
    assert is_worth_sending(bytes(size_bytes - 1), spec)
    assert not is_worth_sending(bytes(size_bytes), spec)


def test_where_no_size_is_known_images_are_sent() -> None:
    assert is_worth_sending(bytes(1 << 20), Preprocess(resize=2))


def test_images_are_chosen_by_their_place(tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x")
    large.write_bytes(bytes(48))
    images = [small, large, str(small), b"y", np.zeros((1, 1, 3), np.uint8), tmp_path / "missing", "https://x/y.png"]
    chosen = choose_encoded(images, "auto", SPEC, fetch_timeout_s=None)
    assert chosen == {0: b"x", 2: b"x", 3: b"y"}
    assert choose_encoded(images, "encoded", SPEC, fetch_timeout_s=None) == {**chosen, 1: bytes(48)}


def test_pixels_have_no_bytes() -> None:
    assert read_encoded(np.zeros((1, 1, 3), np.uint8), fetch_timeout_s=None) is None


def test_the_tensor_has_an_element_for_each_image() -> None:
    assert to_tensor([b"a", b"b\0"], batched=True).tolist() == [[b"a"], [b"b\0"]]
    assert to_tensor([b"a"], batched=False).tolist() == [b"a"]


def test_another_form_is_refused() -> None:
    with pytest.raises(InvalidInput, match="'auto', 'encoded' or 'tensor', got 'jpeg'"):
        check_form("jpeg")
