"""Forward and backward pass in one graph, compared with autograd."""

from __future__ import annotations

import json
from pathlib import Path

import modules
import numpy as np
import pytest
import torch
from converting import MODULES, Convert

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.graph.errors import VerificationError
from graphkiln_backend.graph.manifest import Manifest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", ["pooling", "inception"])
def test_small_models(run: Convert, name: str) -> None:
    version = run(f"python:{MODULES}:{name}", gradient="output:image")
    module = getattr(modules, name)()[0].eval()
    for rows in (1, 2, 5):
        image = torch.randn(rows, 3, 16, 16, requires_grad=True)
        module(image).sum().backward()
        with OnnxRuntimeEngine().build_reference(version / "model.onnx") as session:
            outputs = session.run({"INPUT_0": image.detach().numpy()})
        np.testing.assert_allclose(outputs["OUTPUT_1"], image.grad.numpy(), rtol=1e-3, atol=1e-4)  # type: ignore[union-attr]
    steps = [verification.step for verification in Manifest.read(version / "manifest.json").verification]
    assert steps == ["export", "export gradient"]


@pytest.mark.families
@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnets(run: Convert, name: str) -> None:
    version = run(f"torchvision:{name}", shape=["3x64x64"], gradient="output:image")
    assert Manifest.read(version / "manifest.json").verification[1].verdict.endswith("PASS")


@pytest.mark.slow
def test_a_vit(run: Convert, tmp_path: Path) -> None:
    config = {"architectures": ["ViTForImageClassification"], "image_size": 32, "patch_size": 8, "hidden_size": 64}
    config |= {"model_type": "vit", "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    version = run(f"huggingface:{tmp_path}", gradient="logits:pixel_values")
    assert Manifest.read(version / "manifest.json").verification[1].verdict.endswith("PASS")


def test_a_wrong_gradient_is_refused(run: Convert, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphkiln_converters import gradient as decompositions

    original = decompositions.convolution_backward
    monkeypatch.setattr(decompositions, "convolution_backward", lambda *a: (original(*a)[0] * 1.001, None, None))
    with pytest.raises(VerificationError, match="export gradient"):
        run(f"python:{MODULES}:pooling", gradient="output:image")
