"""What graphs take of images, and what they do not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ExecutionError
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.signature import Signature, TensorSpec
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.scorer import BatchBuffer, ImageInput

RGB = Preprocess(crop=(8, 6))


def signature(*shape: int | str, dtype: DType = DType.FP32) -> Signature:
    output = TensorSpec(name="y", dtype=DType.FP32, shape=(*shape[:-3], 10))
    return Signature(inputs=(TensorSpec(name="x", dtype=dtype, shape=shape),), outputs=(output,))


class TestForms:
    def test_batches(self) -> None:
        found = ImageInput.of(signature("batch", 3, 8, 6), RGB, 4)
        assert (found.batched, found.most_rows) == (True, 4)
        samples = [np.full((3, 8, 6), number, np.float32) for number in range(2)]
        batches = BatchBuffer()
        assert found.feeds(samples, batches)["x"].tolist() == np.stack(samples).tolist()
        assert found.feeds(samples[:1], batches)["x"].shape == (1, 3, 8, 6)

    @pytest.mark.parametrize("first", [1, "batch"])
    def test_without_batches_one_by_one(self, first: int | str) -> None:
        found = ImageInput.of(signature(first, 3, 8, 6), RGB, 0)
        assert (found.batched, found.most_rows) == (True, 1)

    def test_without_a_batch_dimension(self) -> None:
        graph = signature(3, 8, 6)
        found = ImageInput.of(graph, RGB, 0)
        assert (found.batched, found.most_rows) == (False, 1)
        assert found.feeds([np.zeros((3, 8, 6), np.float32)], BatchBuffer())["x"].shape == (3, 8, 6)
        assert found.rows({"y": np.zeros(10)}, 1)["y"].shape == (1, 10)
        assert found.signature_of_rows(graph).outputs[0].shape == ("batch", 10)

    def test_raw_pixels_and_half_precision(self) -> None:
        raw = Preprocess(crop=(8, 6), layout="HWC", dtype=DType.UINT8)
        assert ImageInput.of(signature("batch", 8, 6, 3, dtype=DType.UINT8), raw, 2).most_rows == 2
        half = replace(RGB, dtype=DType.FP16)
        assert ImageInput.of(signature("batch", 3, 8, 6, dtype=DType.FP16), half, 2).most_rows == 2

    def test_images_of_any_size(self) -> None:
        assert ImageInput.of(signature("batch", 3, "height", "width"), Preprocess(), 2).batched


class TestRefusals:
    @pytest.mark.parametrize(
        ("graph", "spec"),
        [
            (signature("batch", 3, 8, 6, dtype=DType.UINT8), RGB),
            (signature("batch", 3, 8, 8), RGB),
            (signature("batch", 3, 8, 6), Preprocess(resize=(8, 8))),
            (signature("batch", 8, 6, 3), RGB),
            (signature("batch", 10), RGB),
            (signature(4, 3, 8, 6), RGB),
            (signature("batch", 1, 8, 6), Preprocess()),
        ],
    )
    def test_what_images_do_not_become(self, graph: Signature, spec: Preprocess) -> None:
        with pytest.raises(ScoringError, match="does not take what images become"):
            ImageInput.of(graph, spec, 0)

    def test_two_inputs(self) -> None:
        (image,) = signature("batch", 3, 8, 6).inputs
        graph = Signature(inputs=(image, replace(image, name="mask")), outputs=())
        with pytest.raises(ScoringError, match="one input, the image; it has 2: x, mask"):
            ImageInput.of(graph, RGB, 4)

    def test_an_output_that_has_not_a_row_for_each_image(self) -> None:
        found = ImageInput.of(signature("batch", 3, 8, 6), RGB, 4)
        with pytest.raises(ExecutionError, match=r"shape \[3, 10\] for 2 images"):
            found.rows({"y": np.zeros((3, 10))}, 2)


class TestBatchBuffer:
    def test_batches_of_any_size_shape_and_type_share_its_memory(self) -> None:
        batches = BatchBuffer()
        first = batches.stack([np.full((3, 8, 6), number, np.float32) for number in range(4)])
        assert first[:, 0, 0, 0].tolist() == [0, 1, 2, 3]
        smaller = batches.stack([np.full((3, 4, 4), number, np.uint8) for number in (7, 9)])
        assert (smaller.shape, smaller.dtype) == ((2, 3, 4, 4), np.uint8)
        assert smaller[:, 2, 3, 3].tolist() == [7, 9]
        assert np.shares_memory(first, smaller)
        larger = batches.stack([np.full((3, 9, 9), number, np.float16) for number in range(9)])
        assert larger[8].tolist() == np.full((3, 9, 9), 8).tolist()
        assert larger.flags.c_contiguous
