"""What benchmarks run on: exported graphs and synthetic photographs, kept between runs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.passes.renaming import Rename
from graphkiln_converters.sources.base import SourceOptions, open_source

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "benchmark"


def exported_graph(architecture: str) -> Path:
    """The graph of an architecture with random weights, exported once.

    Args:
        architecture: Of torchvision, or with the source's name before it, such as `timm:vit_tiny_patch16_224`.
    """
    source = architecture if ":" in architecture else f"torchvision:{architecture}"
    cached = CACHE / f"{architecture.rpartition(':')[2]}.onnx"
    if not cached.exists():
        print(f"exporting {architecture} (once)", file=sys.stderr)
        CACHE.mkdir(parents=True, exist_ok=True)
        model = open_source(source, SourceOptions()).export()
        run_passes(model, (*OPTIMIZATIONS, Rename({"image": "INPUT_0"}, {"output": "OUTPUT_0"})))
        partial = cached.with_suffix(".partial.onnx")
        save(model, partial)
        partial.rename(cached)
    return cached


def synthetic_photograph(width: int, height: int, seed: int = 0) -> bytes:
    """A JPEG with a photograph's share of detail: smoothed noise."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 6, width // 6, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()
