"""Trains the networks for scenes of digits, each from a fixed seed: versions of libraries and processor repeat it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import torch
from torch import nn

from graphkiln.story.digits import CLASSES, digit_image
from graphkiln.training.augmentation import random_affine
from graphkiln.training.scene_losses import DetectorTargets, detector_loss, embedding_loss, stroke_loss
from graphkiln.training.scene_networks import DigitEmbedding, SceneDetector, SceneSegmenter
from graphkiln.training.scenes import Scene, compose_scenes, digit_rows

SEED = 20260101
BATCH = 32
EMBEDDING_SIDE = 32
SEGMENTS = ("background", *CLASSES)
DETECTOR_GRAPH = Path(__file__).parents[3] / "model_repository" / "scenes-detector" / "1" / "model.onnx"

Loss = Callable[[torch.Tensor], torch.Tensor]
"""Of the samples with these row numbers."""


def to_input(pixels: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
    """Gray levels, uint8 `[height, width]` each, as the networks take them: -1..1, `[samples, 1, height, width]`."""
    return (torch.from_numpy(np.stack(pixels)).float() / 255 - 0.5).div(0.5).unsqueeze(1)


def train_detector(scenes: int = 3000, steps: int = 1500) -> SceneDetector:
    """A detector of ten digits."""
    _begin()
    training = compose_scenes(scenes, seed=SEED)
    samples, targets = scene_samples(training), DetectorTargets(training, len(CLASSES))
    network = SceneDetector(len(CLASSES))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return detector_loss(*network.maps(samples[rows]), targets, rows)

    _fit(network.parameters(), loss, len(samples), steps)
    return network.eval()


def train_segmenter(scenes: int = 1500, steps: int = 400, detector: SceneDetector | None = None) -> SceneSegmenter:
    """A segmenter of ten digits and the background, around a trained detector; None for the committed one."""
    _begin()
    network = SceneSegmenter(detector or committed_detector())
    training = compose_scenes(scenes, seed=SEED)
    with torch.no_grad():
        parts = scene_samples(training).split(BATCH)  # type: ignore[no-untyped-call]
        levels = torch.cat([network.levels(part) for part in parts])
    classes = torch.from_numpy(np.stack([scene.segmentation for scene in training])).long()

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return stroke_loss(network.strokes(levels[rows]), classes[rows])

    _fit(network.strokes.parameters(), loss, len(levels), steps)
    return network.eval()


def committed_detector() -> SceneDetector:
    """The detector of the checkout's model repository, with the weights of its graph.

    Raises:
        FileNotFoundError: This is no checkout.
    """
    detector = SceneDetector(len(CLASSES)).eval()
    graph = onnx.load(DETECTOR_GRAPH).graph
    trained = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    state = detector.state_dict()
    named = [name for name in state if not name.endswith("num_batches_tracked")]
    detector.load_state_dict({**state, **{name: trained[name] for name in named}})
    return detector


def train_embedding(steps: int = 400) -> DigitEmbedding:
    """Vectors of digits."""
    generator = _begin()
    samples, values = embedding_samples(held_out=False)
    network, directions = DigitEmbedding(), nn.Parameter(torch.randn(len(CLASSES), 32, generator=generator))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        augmented = random_affine(
            samples[rows], EMBEDDING_SIDE, angle=0.2, scale=(0.85, 1.2), shift=0.12, generator=generator
        )
        return embedding_loss(network(augmented), directions, values[rows])

    _fit([*network.parameters(), directions], loss, len(samples), steps)
    return network.eval()


def embedding_samples(*, held_out: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Digits as the embedding takes them, `[digits, 1, 32, 32]`, and their values, `[digits]`."""
    digits, values = digit_rows(held_out)
    pixels = [np.asarray(digit_image(digit, EMBEDDING_SIDE)) for digit in digits]
    return to_input(pixels), torch.from_numpy(values)


def scene_samples(scenes: Sequence[Scene]) -> torch.Tensor:
    """Scenes as the networks take them, `[scenes, 1, 96, 96]`."""
    return to_input([scene.pixels for scene in scenes])


def _begin() -> torch.Generator:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(mode=True)
    return torch.Generator().manual_seed(SEED)


def _fit(parameters: Iterable[nn.Parameter], loss: Loss, count: int, steps: int) -> None:
    """One cycle of AdamW over random batches."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        rows = torch.randint(count, (BATCH,), generator=generator)
        value = loss(rows)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == steps:
            line = f"step {step}/{steps}, loss {value.item():.3f}, {time.perf_counter() - begun:.0f} s"
            print(f"\r\033[K{line}", end="", file=sys.stderr)
    print(file=sys.stderr)
