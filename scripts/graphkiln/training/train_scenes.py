"""Trains small examples of what is not classification, and writes each as a proven version.

A detector and a segmenter of digits in composed scenes, and an embedding of single digits; all from scikit-learn's
handwritten digits. Each is measured on digits that it was not trained on, and written only where it is good.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from graphkiln.story.digits import CLASSES
from graphkiln.training.scene_training import (
    EMBEDDING_SIDE,
    SEGMENTS,
    embedding_samples,
    scene_samples,
    train_detector,
    train_embedding,
    train_segmenter,
)
from graphkiln.training.scenes import SIDE, compose_scenes
from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task
from graphkiln_backend.proof.class_maps import class_map
from graphkiln_backend.proof.metrics import Objects, detection_map, mean_iou, recall_at_1
from graphkiln_converters.proving import ReferenceSamples
from graphkiln_converters.sources.pytorch import export_graph
from graphkiln_converters.writer import SourceInfo, prove_and_write

CACHE = "graphkiln-scenes"
"""Folder of the examples, in the user's cache."""
_TEST_SCENES = 200
_TEST_SEED = 7
_PROOF_SAMPLES = 64
_SAMPLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One of the networks.

    Attributes:
        train: Trains it.
        task: How its outputs are read.
        labels: Of its classes; empty for none.
        side: Height and width of its input.
        metric: What it is measured by.
        least: Least value of the metric; below it, nothing is written.
        measure: The metric of outputs for the samples of `held_out`.
        held_out: Samples that it is not trained on.
    """

    train: Callable[[], nn.Module]
    task: Task
    labels: tuple[str, ...]
    side: int
    metric: str
    least: float
    measure: Callable[[Mapping[str, AnyArray]], float]
    held_out: Callable[[], torch.Tensor]


DETECTION = Detection(boxes="OUTPUT_0", scores="OUTPUT_1", classes="OUTPUT_2", counts="OUTPUT_3")
SEGMENTATION = Segmentation(scores="OUTPUT_0")
EMBEDDING = Embedding(vectors="OUTPUT_0")


def map_at_50(outputs: Mapping[str, AnyArray]) -> float:
    """MAP at IoU 0.5 on the held-out scenes."""
    scenes = compose_scenes(_TEST_SCENES, seed=_TEST_SEED, held_out=True)
    objects = [Objects(boxes=scene.boxes.astype(np.float64), classes=scene.classes) for scene in scenes]
    return detection_map(DETECTION, outputs, objects, iou=0.5)


def mean_overlap(outputs: Mapping[str, AnyArray]) -> float:
    """MIoU on the held-out scenes."""
    scenes = compose_scenes(_TEST_SCENES, seed=_TEST_SEED, held_out=True)
    return mean_iou(
        class_map(SEGMENTATION, outputs), np.stack([scene.segmentation for scene in scenes]).astype(np.int64)
    )


def recall(outputs: Mapping[str, AnyArray]) -> float:
    """recall@1 of the held-out digits."""
    _, values = embedding_samples(held_out=True)
    return recall_at_1(outputs[EMBEDDING.vectors], values.numpy())


def _held_out_scenes() -> torch.Tensor:
    return scene_samples(compose_scenes(_TEST_SCENES, seed=_TEST_SEED, held_out=True))


EXAMPLES: Mapping[str, Example] = {
    "detector": Example(
        train=train_detector,
        task=DETECTION,
        labels=CLASSES,
        side=SIDE,
        metric="map_50",
        least=0.9,
        measure=map_at_50,
        held_out=_held_out_scenes,
    ),
    "segmenter": Example(
        train=train_segmenter,
        task=SEGMENTATION,
        labels=SEGMENTS,
        side=SIDE,
        metric="miou",
        least=0.9,
        measure=mean_overlap,
        held_out=_held_out_scenes,
    ),
    "embedding": Example(
        train=train_embedding,
        task=EMBEDDING,
        labels=(),
        side=EMBEDDING_SIDE,
        metric="recall_1",
        least=0.95,
        measure=recall,
        held_out=lambda: embedding_samples(held_out=True)[0],
    ),
}


def compute(network: nn.Module, samples: torch.Tensor) -> dict[str, AnyArray]:
    """The network's outputs by the names of the graph, `[samples, ...]` each."""
    with torch.inference_mode():
        outputs = network(samples)
    arrays = outputs if isinstance(outputs, tuple) else (outputs,)
    return {f"OUTPUT_{number}": array.numpy() for number, array in enumerate(arrays)}


def write_example(name: str, network: nn.Module, store: Path, number: int) -> str:
    """Measures a network on what is held out, proves its graph, and writes `STORE/scenes-NAME/NUMBER/`.

    Args:
        name: A key of `EXAMPLES`.
        network: The trained network, in evaluation mode.
        store: The model store.
        number: Version number; must not exist yet.

    Returns:
        The proof's verdict.

    Raises:
        SystemExit: The network is not good enough; nothing is written.
        VerificationError: The graph's outputs are not the network's.
    """
    example = EXAMPLES[name]
    samples = example.held_out()
    outputs = compute(network, samples)
    value = example.measure(outputs)
    print(f"{example.metric} {value:.4f} on {len(samples)} held-out images", file=sys.stderr)
    if value < example.least:
        sys.exit(f"train-scenes: {example.metric} below {example.least}: nothing written")
    side = example.side
    source = SourceInfo(
        description=f"{type(network).__name__} trained on scikit-learn's digits",
        command=f"scripts/train-scenes {name}",
        libraries=("torch", "onnx", "onnxruntime", "scikit-learn", "numpy", "pillow"),
        metrics={example.metric: round(value, 4), "test_images": len(samples)},
        preprocess=Preprocess(resize=(side, side), crop=(side, side), mean=(0.5,), std=(0.5,), color="L"),
        labels=example.labels,
        task=example.task,
    )
    reference = ReferenceSamples(
        feeds={"INPUT_0": samples[:_PROOF_SAMPLES].numpy()},
        outputs={key: array[:_PROOF_SAMPLES] for key, array in outputs.items()},
        task=example.task,
    )
    with tempfile.TemporaryDirectory() as temporary:
        graph = Path(temporary) / "scenes.onnx"
        export_graph(network, samples[0].numpy(), graph, further_outputs=list(outputs)[1:])
        manifest = prove_and_write(graph, source, reference, store / f"scenes-{name}", number)
    return manifest.verification[0].verdict


def save_scenes(folder: Path) -> None:
    """Writes the first held-out scenes as PNG, named by their numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, scene in enumerate(compose_scenes(_SAMPLES, seed=_TEST_SEED, held_out=True), 1):
        Image.fromarray(scene.pixels).save(folder / f"{number}.png")


def main() -> None:
    """Trains, evaluates, proves, writes."""
    parser = argparse.ArgumentParser(prog="scripts/train-scenes", description=__doc__)
    parser.add_argument("example", choices=list(EXAMPLES), help="what to train")
    parser.add_argument("--model-store", type=Path, help="where to write (default: in the user's cache)")
    parser.add_argument("--version", type=int, default=1, help="version number to write; must not exist yet")
    parser.add_argument("--samples", type=Path, help="also write a few held-out scenes as images into this folder")
    options = parser.parse_args()
    if options.samples:
        save_scenes(options.samples)
    store = options.model_store or user_cache_folder(CACHE)
    verdict = write_example(options.example, EXAMPLES[options.example].train(), store, options.version)
    print(verdict, file=sys.stderr)
    print(store / f"scenes-{options.example}" / str(options.version))


if __name__ == "__main__":
    main()
