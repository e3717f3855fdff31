"""Inputs of benchmarks: exported graphs, synthetic photographs and model stores."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

from graphkiln_backend.engines.hardware import missing_instructions
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.graph.manifest import FORMAT_VERSION, MANIFEST_FILE, Golden, Manifest, Provenance, sha256_of
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.passes.base import run_passes
from graphkiln_backend.passes.edge_passes import Rename
from graphkiln_backend.passes.graph_file import save
from graphkiln_backend.passes.pipeline import OPTIMIZATIONS
from graphkiln_backend.repository.config import BACKEND, config_text
from graphkiln_backend.repository.version import GOLDEN_FILE, GRAPH_FILE
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources.base import open_source

# Model stores for benchmarks.

REPOSITORY = Path(__file__).resolve().parents[2]
DIGITS = REPOSITORY / "model_repository" / "digits"
LARGEST_BATCH = 8  # of what `add_model` adds
_GOLDEN_SAMPLES = 4


def add_model(
    store: Path, name: str, graph: Path, extra: str = "", backend: str = BACKEND, *, golden: bool = False
) -> None:
    """Add a graph to a model store, with a complete configuration.

    Args:
        store: The store.
        name: Name of the model.
        graph: The graph.
        extra: Appended to the configuration.
        backend: Backend of the configuration.
        golden: Add a manifest and golden samples.
    """
    folder = store / name / "1"
    folder.mkdir(parents=True)
    (folder / GRAPH_FILE).symlink_to(graph)
    with _reference_signature(graph) as signature:
        text = config_text(name, signature, max_batch_size=LARGEST_BATCH, labels_file=None)
    text = text.replace(f'backend: "{BACKEND}"', f'backend: "{backend}"')
    (store / name / "config.pbtxt").write_text(text + extra)
    if golden:
        _add_golden(folder, graph)


def _add_golden(folder: Path, graph: Path) -> None:
    """Write golden samples of noise and a manifest, as a conversion would."""
    from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine

    noise = np.random.default_rng(0)
    with OnnxRuntimeEngine().build_reference(graph) as session:
        signature = session.signature
        feeds = {
            spec.name: noise.normal(size=[_GOLDEN_SAMPLES, *map(int, spec.shape[1:])]).astype(spec.dtype.numpy)
            for spec in signature.inputs
        }
        outputs = session.run(feeds)
    GoldenSamples(inputs=feeds, source_outputs=outputs, graph_outputs=outputs).write(folder / GOLDEN_FILE)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        graph_file=GRAPH_FILE,
        sha256=sha256_of(graph),
        signature=signature,
        preprocess=None,
        labels=None,
        provenance=Provenance(source="a benchmark", command=""),
        verification=(),
        golden=Golden(file=GOLDEN_FILE, sha256=sha256_of(folder / GOLDEN_FILE), samples=_GOLDEN_SAMPLES),
    )
    manifest.write(folder / MANIFEST_FILE)


def parameters(settings: Mapping[str, str]) -> str:
    """Format settings for config.pbtxt."""
    return "".join(
        f'parameters {{ key: "{key}" value {{ string_value: {json.dumps(value)} }} }}\n'
        for key, value in settings.items()
    )


def openvino_settings() -> dict[str, str]:
    """OpenVINO in bf16 if the processor supports it, else in fp32."""
    precision = Precision.FP32 if missing_instructions(Precision.BF16) else Precision.BF16
    return {"engine": "openvino", "precision": str(precision)}


@contextmanager
def _reference_signature(graph: Path) -> Iterator[Signature]:
    from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine

    with OnnxRuntimeEngine().build_reference(graph) as session:
        yield session.signature


CACHE = Path(__file__).resolve().parents[2] / ".cache" / "benchmark"


def exported_graph(architecture: str) -> Path:
    """Export the graph of an architecture with random weights, once.

    Args:
        architecture: torchvision's name, or one with a source, such as `timm:vit_tiny_patch16_224`.
    """
    source = architecture if ":" in architecture else f"torchvision:{architecture}"
    cached = CACHE / f"{architecture.rpartition(':')[2]}.onnx"
    if not cached.exists():
        print(f"exporting {architecture} (once)", file=sys.stderr)
        CACHE.mkdir(parents=True, exist_ok=True)
        model = open_source(Recipe(source=source)).export()
        run_passes(model, (*OPTIMIZATIONS, Rename({"image": "INPUT_0"}, {"output": "OUTPUT_0"})))
        partial = cached.with_suffix(".partial.onnx")
        save(model, partial)
        partial.rename(cached)
    return cached


def synthetic_photograph(width: int, height: int, seed: int = 0) -> bytes:
    """Make a JPEG of smoothed noise, with about as much detail as a photograph."""
    noise = np.random.default_rng(seed).integers(0, 256, (height // 6, width // 6, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()
