"""Train small example models for detection, segmentation and embedding, and write each as a proven version.

All use scikit-learn's handwritten digits: scenes of digits for the detector and the segmenter, single digits for the
embedding. Each model is evaluated on held-out digits, and written only if it is accurate enough.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import torch
from PIL import Image
from torch import nn

from graphkiln.story.digits import CLASSES, digit_image
from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.graph.task import Detection, Embedding, Segmentation, Task
from graphkiln_backend.proof.tasks import Objects, class_map, detection_map, mean_iou, recall_at_1
from graphkiln_converters.prove import ReferenceSamples
from graphkiln_converters.sources.pytorch import export_graph
from graphkiln_converters.write import SourceInfo, prove_and_write
from training.augmentation import random_affine
from training.scenes import (
    SIDE,
    STRIDE,
    DigitEmbedding,
    Scene,
    SceneDetector,
    SceneSegmenter,
    compose_scenes,
    digit_rows,
)

_CELLS = SIDE // STRIDE
_SPREAD = 0.08  # width of a peak relative to the sides of its box
_NEAR = 0.5  # cells with at least this heat also learn the box
_TINY = 1e-6


class DetectorTargets:
    """Targets of the detector for a set of scenes.

    Attributes:
        heat: 1 at the centre of each digit, decreasing around it, `[scenes, classes, rows, columns]`.
        boxes: Box of the digit that a cell belongs to, in pixels, `[scenes, 4, rows, columns]`.
        weights: Weight of a cell for its box, `[scenes, rows, columns]`.
    """

    def __init__(self, scenes: Sequence[Scene], classes: int) -> None:
        self.heat = torch.zeros(len(scenes), classes, _CELLS, _CELLS)
        self.boxes = torch.zeros(len(scenes), 4, _CELLS, _CELLS)
        self.weights = torch.zeros(len(scenes), _CELLS, _CELLS)
        centres = (torch.arange(_CELLS, dtype=torch.float32) + 0.5) * STRIDE
        for number, scene in enumerate(scenes):
            for box, value in zip(torch.from_numpy(scene.boxes), scene.classes.tolist(), strict=True):
                self._add(number, box, value, centres)

    def _add(self, number: int, box: torch.Tensor, value: int, centres: torch.Tensor) -> None:
        x1, y1, x2, y2 = box.tolist()
        rows, columns = (
            torch.exp(-(((centres - _nearest(centres, (low + high) / 2)) / ((high - low) * _SPREAD + 2)) ** 2) / 2)
            for low, high in ((y1, y2), (x1, x2))
        )
        peak = rows.unsqueeze(1) * columns.unsqueeze(0)
        self.heat[number, value] = torch.maximum(self.heat[number, value], peak)
        near = (peak > _NEAR) & (peak > self.weights[number])
        self.weights[number][near] = peak[near]
        self.boxes[number][:, near] = box.unsqueeze(1)


def _nearest(centres: torch.Tensor, position: float) -> torch.Tensor:
    return centres[(centres - position).abs().argmin()]


def detector_loss(
    logits: torch.Tensor, boxes: torch.Tensor, targets: DetectorTargets, rows: torch.Tensor
) -> torch.Tensor:
    """Compute the focal loss of the peaks plus one minus the IoU of the boxes near them.

    Source: Law and Deng, "CornerNet", 2018 (the focal loss); Rezatofighi et al., "Generalized IoU", 2019.
    """
    heat, wanted, weights = targets.heat[rows], targets.boxes[rows], targets.weights[rows]
    chance = logits.sigmoid().clamp(_TINY, 1 - _TINY)
    positive = heat == 1
    hit = ((1 - chance) ** 2 * chance.log())[positive].sum()
    miss = ((1 - heat) ** 4 * chance**2 * (1 - chance).log())[~positive].sum()
    focal = -(hit + miss) / positive.sum().clamp(min=1)
    return focal + 2 * (weights * (1 - generalized_iou(boxes, wanted))).sum() / weights.sum().clamp(min=1)


def generalized_iou(boxes: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """Compute the generalized IoU of boxes `[batch, 4, ...]`, -1..1 `[batch, ...]`."""
    x1, y1, x2, y2 = boxes.unbind(dim=1)
    u1, v1, u2, v2 = others.unbind(dim=1)
    across = (torch.minimum(x2, u2) - torch.maximum(x1, u1)).clamp(min=0)
    down = (torch.minimum(y2, v2) - torch.maximum(y1, v1)).clamp(min=0)
    shared = across * down
    union = (x2 - x1) * (y2 - y1) + (u2 - u1) * (v2 - v1) - shared
    hull = (torch.maximum(x2, u2) - torch.minimum(x1, u1)) * (torch.maximum(y2, v2) - torch.minimum(y1, v1))
    return shared / union.clamp(min=_TINY) - (hull - union) / hull.clamp(min=_TINY)


def stroke_loss(ink: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of ink and background plus one minus their overlap, which helps thin strokes.

    Args:
        ink: Logits, `[batch, 1, height, width]`.
        classes: Class of each pixel, int64 `[batch, height, width]`; 0 is the background.

    Source: Milletari, Navab, Ahmadi, "V-Net", 2016 (the Dice loss).
    """
    wanted = (classes > 0).float().unsqueeze(1)
    share = ink.sigmoid()
    overlap = 2 * (share * wanted).sum() / (share + wanted).sum().clamp(min=1)
    return nn.functional.binary_cross_entropy_with_logits(ink, wanted) + 1 - overlap


def embedding_loss(vectors: torch.Tensor, directions: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Compute the cross entropy of the cosines with one direction per class, `[classes, features]`.

    Source: Wang et al., "CosFace", 2018 (the margin of 0.2 and the scale).
    """
    cosines = vectors @ nn.functional.normalize(directions, dim=1).T
    margin = 0.2 * nn.functional.one_hot(values, len(directions))
    return nn.functional.cross_entropy(16 * (cosines - margin), values)


SEED = 20260101
BATCH = 32
EMBEDDING_SIDE = 32
SEGMENTS = ("background", *CLASSES)
DETECTOR_GRAPH = Path(__file__).parents[2] / "model_repository" / "scenes-detector" / "1" / "model.onnx"

Loss = Callable[[torch.Tensor], torch.Tensor]  # from row numbers of a batch


def to_input(pixels: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
    """Convert gray images, uint8 `[height, width]` each, to -1..1, `[samples, 1, height, width]`."""
    return (torch.from_numpy(np.stack(pixels)).float() / 255 - 0.5).div(0.5).unsqueeze(1)


def train_detector(scenes: int = 3000, steps: int = 1500) -> SceneDetector:
    """Train a detector of ten digits."""
    _begin()
    training = compose_scenes(scenes, seed=SEED)
    samples, targets = scene_samples(training), DetectorTargets(training, len(CLASSES))
    network = SceneDetector(len(CLASSES))

    def loss(rows: torch.Tensor) -> torch.Tensor:
        return detector_loss(*network.maps(samples[rows]), targets, rows)

    _fit(network.parameters(), loss, len(samples), steps)
    return network.eval()


def train_segmenter(scenes: int = 1500, steps: int = 400, detector: SceneDetector | None = None) -> SceneSegmenter:
    """Train a segmenter of ten digits and the background; the default detector is the committed one."""
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
    """Load the detector of the checkout's model repository.

    Raises:
        FileNotFoundError: The model repository is missing.
    """
    detector = SceneDetector(len(CLASSES)).eval()
    graph = onnx.load(DETECTOR_GRAPH).graph
    trained = {each.name: torch.from_numpy(onnx.numpy_helper.to_array(each).copy()) for each in graph.initializer}
    state = detector.state_dict()
    named = [name for name in state if not name.endswith("num_batches_tracked")]
    detector.load_state_dict({**state, **{name: trained[name] for name in named}})
    return detector


def train_embedding(steps: int = 400) -> DigitEmbedding:
    """Train an embedding of digits."""
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
    """Load the inputs of the embedding, `[digits, 1, 32, 32]`, and the digits' values, `[digits]`."""
    digits, values = digit_rows(held_out)
    pixels = [np.asarray(digit_image(digit, EMBEDDING_SIDE)) for digit in digits]
    return to_input(pixels), torch.from_numpy(values)


def scene_samples(scenes: Sequence[Scene]) -> torch.Tensor:
    """Convert scenes to inputs, `[scenes, 1, 96, 96]`."""
    return to_input([scene.pixels for scene in scenes])


def _begin() -> torch.Generator:
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(mode=True)
    return torch.Generator().manual_seed(SEED)


def _fit(parameters: Iterable[nn.Parameter], loss: Loss, count: int, steps: int) -> None:
    """Train with AdamW and a one-cycle schedule on random batches."""
    generator = torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.AdamW(parameters, lr=4e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    started = time.perf_counter()
    for step in range(1, steps + 1):
        rows = torch.randint(count, (BATCH,), generator=generator)
        value = loss(rows)
        optimizer.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        if step % 10 == 0 or step == steps:
            line = f"step {step}/{steps}, loss {value.item():.3f}, {time.perf_counter() - started:.0f} s"
            print(f"\r\033[K{line}", end="", file=sys.stderr)
    print(file=sys.stderr)


CACHE = "graphkiln-scenes"  # folder in the user's cache
_TEST_SCENES = 200
_TEST_SEED = 7
_PROOF_SAMPLES = 64
_SAMPLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """An example model.

    Attributes:
        side: Height and width of its input.
        least: Minimum value of the metric for a model to be written.
        measure: Computes the metric of outputs for the samples of `held_out`.
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
    """Compute mAP at IoU 0.5 on the held-out scenes."""
    scenes = compose_scenes(_TEST_SCENES, seed=_TEST_SEED, held_out=True)
    objects = [Objects(boxes=scene.boxes.astype(np.float64), classes=scene.classes) for scene in scenes]
    return detection_map(DETECTION, outputs, objects, iou=0.5)


def mean_overlap(outputs: Mapping[str, AnyArray]) -> float:
    """Compute mIoU on the held-out scenes."""
    scenes = compose_scenes(_TEST_SCENES, seed=_TEST_SEED, held_out=True)
    return mean_iou(
        class_map(SEGMENTATION, outputs), np.stack([scene.segmentation for scene in scenes]).astype(np.int64)
    )


def recall(outputs: Mapping[str, AnyArray]) -> float:
    """Compute recall@1 on the held-out digits."""
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
    """Compute a network's outputs by graph output name, `[samples, ...]` each."""
    with torch.inference_mode():
        outputs = network(samples)
    arrays = outputs if isinstance(outputs, tuple) else (outputs,)
    return {f"OUTPUT_{number}": array.numpy() for number, array in enumerate(arrays)}


def write_example(name: str, network: nn.Module, store: Path, number: int) -> str:
    """Measure a network on held-out samples, prove its graph, and write `STORE/scenes-NAME/NUMBER/`.

    Args:
        name: A key of `EXAMPLES`.
        network: The trained network, in evaluation mode.
        store: The model store.
        number: Version number; must not exist yet.

    Returns:
        The proof's verdict.

    Raises:
        SystemExit: The network is not accurate enough; nothing is written.
        VerificationError: The outputs of the graph and the network differ.
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
    """Write the first held-out scenes as numbered PNG files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, scene in enumerate(compose_scenes(_SAMPLES, seed=_TEST_SEED, held_out=True), 1):
        Image.fromarray(scene.pixels).save(folder / f"{number}.png")


def main() -> None:
    """Train, evaluate, prove and write one example."""
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
