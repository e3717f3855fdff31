"""What the precisions are compared on: ten architectures with random weights, exported and quantized once.

Random weights cost as much as trained ones. What they answer means nothing, and how far a precision moves it says
little: for that, `graphkiln convert --precision int8` proves a trained model on samples of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from inputs import CACHE
from torch import nn

from graphkiln_backend.engines.onnxruntime.quantization import Quantization, quantize
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.errors import LoweringError
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.repository.onnx_file import read_signature
from graphkiln_converters.sources.base import SourceOptions, open_source

_HERE = Path(__file__).resolve()
_TOKENS = 128
_CALIBRATION_SAMPLES = 16
_DETAIL = 8  # pixels in a row that are interpolated between two random ones: a photograph is not white noise

# Name -> what `graphkiln convert` takes.
ARCHITECTURES = {
    "resnet50": "torchvision:resnet50",
    "mobilenet_v3_small": "torchvision:mobilenet_v3_small",
    "efficientnet_b0": "torchvision:efficientnet_b0",
    "convnext_tiny": "torchvision:convnext_tiny",
    "vit_b_16": "timm:vit_base_patch16_224",
    "deit_small": "timm:deit_small_patch16_224",
    "swin_t": "torchvision:swin_t",
    "regnet_y_800mf": "torchvision:regnet_y_800mf",
    "bert_base": f"python:{_HERE}:make_bert",
    "ssdlite320": f"python:{_HERE}:make_detector",
}


class Bert(nn.Module):
    """BERT-base without its pooler: token numbers `[batch, 128]` to hidden states."""

    def __init__(self) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        self.encoder = BertModel(BertConfig(), add_pooling_layer=False)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """`[batch, 128]` -> `[batch, 128, 768]`."""
        states: torch.Tensor = self.encoder(input_ids=input_ids).last_hidden_state
        return states


class Detector(nn.Module):
    """SSDlite on MobileNetV3-large up to its heads; boxes are decoded and suppressed by whoever asks."""

    def __init__(self) -> None:
        from torchvision.models import detection  # prepared by the source

        super().__init__()
        whole = detection.ssdlite320_mobilenet_v3_large(weights=None, weights_backbone=None)
        self.backbone, self.head = whole.backbone, whole.head

    def forward(self, image: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`[batch, 3, 320, 320]` -> boxes `[batch, places, 4]`, classes `[batch, places, 91]`."""
        found = self.head(list(self.backbone(image).values()))
        return found["bbox_regression"], found["cls_logits"]


def make_bert() -> tuple[nn.Module, torch.Tensor]:
    """The module and an example."""
    return Bert(), torch.zeros((2, _TOKENS), dtype=torch.int64)


def make_detector() -> tuple[nn.Module, torch.Tensor]:
    """The module and an example."""
    return Detector(), torch.zeros((2, 3, 320, 320))


@dataclass(frozen=True, kw_only=True, slots=True)
class Graphs:
    """The saved graphs of an architecture, in fp32 and in int8; None where it cannot be quantized."""

    fp32: Path
    int8: Path | None

    def feeds(self, batch: int, seed: int) -> dict[str, AnyArray]:
        """Random photographs or texts, `[batch, ...]`."""
        return synthetic_feeds(read_signature(self.fp32), batch, np.random.default_rng(seed))


def export_once(name: str) -> Path:
    """The fp32 graph of an architecture, exported where that is not done yet."""
    fp32 = CACHE / f"{name}.precision.onnx"
    _once(fp32, lambda target: _export(name, target))
    return fp32


def prepare(name: str) -> Graphs:
    """Exports and quantizes an architecture where that is not done yet."""
    fp32, int8 = export_once(name), CACHE / f"{name}.precision-int8.onnx"
    graphs = Graphs(fp32=fp32, int8=int8)
    samples, settings = graphs.feeds(_CALIBRATION_SAMPLES, seed=0), Quantization(batch_size=4)
    try:
        _once(int8, lambda target: quantize(fp32, samples, settings, target))
    except LoweringError as error:
        print(f"{name} in int8: {error}", file=sys.stderr)
        return replace(graphs, int8=None)
    return graphs


def synthetic_feeds(signature: Signature, batch: int, random: np.random.Generator) -> dict[str, AnyArray]:
    """Inputs for a signature: smoothed noise for images, numbers below 30,000 for tokens.

    Args:
        signature: Only the first dimension varies.
        batch: Its size.
        random: Where they come from.
    """
    feeds: dict[str, AnyArray] = {}
    for spec in signature.inputs:
        shape = (batch, *(int(size) for size in spec.shape[1:]))
        if np.issubdtype(spec.dtype.numpy, np.integer):
            feeds[spec.name] = random.integers(0, 30_000, shape).astype(spec.dtype.numpy)
        else:
            feeds[spec.name] = _smooth(random, shape).astype(spec.dtype.numpy)
    return feeds


def _smooth(random: np.random.Generator, shape: tuple[int, ...]) -> AnyArray:
    """`[batch, channels, height, width]`, normalized as a photograph is."""
    height, width = shape[-2:]
    coarse = random.normal(size=(*shape[:-2], -(-height // _DETAIL), -(-width // _DETAIL)))
    smooth = nn.functional.interpolate(torch.tensor(coarse), (height, width), mode="bicubic")
    return np.asarray(smooth)


def _export(name: str, target: Path) -> None:
    torch.manual_seed(0)
    model = open_source(ARCHITECTURES[name], SourceOptions()).export()
    run_passes(model, OPTIMIZATIONS)
    save(model, target)


def _once(path: Path, make: Callable[[Path], object]) -> None:
    """Makes a file that is not there, whole or not at all."""
    if path.exists():
        return
    print(f"making {path.name} (once)", file=sys.stderr)
    CACHE.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"partial-{path.name}")
    make(partial)
    partial.rename(path)
