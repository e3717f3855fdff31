"""The source model: a PyTorch classifier of one image, and how an image becomes its input."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stories import story_request

from graphkiln.story.source import open_source_model, source_preprocess
from graphkiln_backend.graph.errors import ConversionError, ManifestError
from graphkiln_backend.graph.preprocess import Preprocess

SPEC = {"resize": 2, "crop": [2, 2]}


def model(preprocess: Preprocess | None) -> Any:
    return SimpleNamespace(preprocess=preprocess)


class TestPreprocess:
    def test_of_the_source(self) -> None:
        spec = Preprocess(resize=3, crop=(3, 3))
        assert source_preprocess(model(spec), story_request()) is spec

    def test_of_the_request_goes_first(self) -> None:
        found = source_preprocess(model(Preprocess(resize=3, crop=(3, 3))), story_request(preprocess=SPEC))
        assert found == Preprocess(resize=2, crop=(2, 2))

    def test_that_nobody_knows_says_how_to_give_it(self) -> None:
        with pytest.raises(ConversionError, match=r"nobody says how an image .*resnet18.*--preprocess '\{"):
            source_preprocess(model(None), story_request())

    @pytest.mark.parametrize(
        ("spec", "named"), [({"resise": 2}, r"preprocess\.resise"), ({"resize": "big"}, r"preprocess\.resize")]
    )
    def test_a_key_that_is_wrong_is_named(self, spec: dict[str, Any], named: str) -> None:
        with pytest.raises(ManifestError, match=named):
            source_preprocess(model(None), story_request(preprocess=spec))


class TestOpen:
    def write(self, folder: Path, body: str) -> str:
        (folder / "made.py").write_text(f"import torch\nfrom torch import nn\n{body}\n")
        return f"python:{folder / 'made.py'}:net"

    def test_a_classifier(self, tmp_path: Path) -> None:
        source = self.write(tmp_path, "def net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(12, 2))")
        model = open_source_model(story_request(source=source, image_size=2, preprocess=SPEC))
        assert [tuple(spec.shape) for spec in model.inputs] == [(3, 2, 2)]  # of one sample
        model.close()

    def test_a_saved_graph_has_no_story(self, digits: Path) -> None:
        source = str(digits / "1" / "model.onnx")
        with pytest.raises(ConversionError, match=r"begins with a PyTorch model of one image.*torchvision:ARCH"):
            open_source_model(story_request(source=source, image_size=32, preprocess=SPEC))

    def test_one_that_nobody_can_preprocess(self, tmp_path: Path) -> None:
        source = self.write(tmp_path, "def net():\n    return nn.Flatten()")
        with pytest.raises(ConversionError, match="nobody says how an image"):
            open_source_model(story_request(source=source, image_size=2))

    def test_an_unknown_architecture(self) -> None:
        with pytest.raises(ConversionError, match="resnet9000"):
            open_source_model(story_request(source="torchvision:resnet9000"))
