"""torchvision's segmenters."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.task import Segmentation
from graphkiln_converters.sources.base import SourceOptions
from graphkiln_converters.sources.torchvision import list_segmenters, open_segmenter


def test_scores_are_torchvisions_own() -> None:
    source = open_segmenter("lraspp_mobilenet_v3_large", SourceOptions(shapes={"": (3, 64, 96)}))
    image = np.random.default_rng(0).standard_normal((1, 3, 64, 96), np.float32)
    found = source.run({"image": image})
    with torch.inference_mode():
        expected = source.module.model(torch.from_numpy(image))["out"]  # type: ignore[operator]
    assert source.task == Segmentation(scores="scores")
    np.testing.assert_array_equal(found["scores"], expected.numpy())
    assert found["scores"].shape == (1, len(source.labels), 64, 96)
    assert source.preprocess is not None
    assert source.preprocess.letterbox is not None


def test_what_is_no_image_is_refused() -> None:
    with pytest.raises(ConversionError, match="takes images"):
        open_segmenter("lraspp_mobilenet_v3_large", SourceOptions(shapes={"": (64, 96)}))


def test_segmenters_are_listed() -> None:
    assert {"deeplabv3_resnet50", "fcn_resnet50", "lraspp_mobilenet_v3_large"} <= set(list_segmenters())
