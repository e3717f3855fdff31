"""Train the example model of `model_repository/digits` and write it as a proven version.

Data: scikit-learn's handwritten digits (1,797 images of 8x8 pixels). Each is rendered as a 64x64 image and preprocessed
as by the client, so that training and serving use the same values.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn

from graphkiln.story.digits import CLASSES, digit_image
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_converters.prove import ReferenceSamples
from graphkiln_converters.sources.pytorch import export_graph, run_module
from graphkiln_converters.write import SourceInfo, prove_and_write
from training.augmentation import random_affine, random_uniform

SEED = 20260101
PREPROCESS = Preprocess(resize=32, crop=(32, 32), mean=(0.5,), std=(0.5,), color="L")
IMAGE_SIDE = 64
EPOCHS = 60
BATCH = 64
MIN_ACCURACY = 0.98
SAMPLE_DIGITS = (3, 4, 7, 8, 9)


class DigitsNet(nn.Module):
    """Four convolutions and a linear layer: `[batch, 1, 32, 32]` pixels in -1..1 to `[batch, 10]` probabilities."""

    def __init__(self) -> None:
        super().__init__()
        widths = (1, 16, 32, 48, 64)
        blocks: list[nn.Module] = []
        for number, (before, after) in enumerate(itertools.pairwise(widths)):
            blocks += [
                nn.Conv2d(before, after, 3, stride=2 if number else 1, padding=1, bias=False),
                nn.BatchNorm2d(after),
                nn.ReLU(),
            ]
        self.features = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], len(CLASSES))

    def logits(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute unnormalized scores for the loss."""
        scores: torch.Tensor = self.head(self.features(pixels).mean(dim=(2, 3)))
        return scores

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Compute probabilities."""
        return self.logits(pixels).softmax(dim=1)


def augment(samples: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Rotate, scale and shift samples at random, and invert half of them to support dark digits on light."""
    side = samples.shape[-1]
    moved = random_affine(samples, side, angle=0.2, scale=(0.85, 1.2), shift=0.12, generator=generator)
    sign = torch.where(random_uniform(len(samples), 0, 1, generator) < 0.5, -1.0, 1.0)
    return moved * sign.view(-1, 1, 1, 1)


def train_network(samples: torch.Tensor, targets: torch.Tensor, epochs: int) -> DigitsNet:
    """Train a network from a fixed seed; reproducible with the same library versions and processor."""
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(mode=True)
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(SEED)
    network = DigitsNet()
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=1e-2)
    steps = epochs * -(-len(samples) // BATCH)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
    for epoch in range(epochs):
        for rows in torch.randperm(len(samples), generator=generator).split(BATCH):  # type: ignore[no-untyped-call]
            loss = nn.functional.cross_entropy(
                network.logits(augment(samples[rows], generator)), targets[rows], label_smoothing=0.05
            )
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
        print(f"\repoch {epoch + 1}/{epochs}, loss {loss.item():.3f}", end="", file=sys.stderr)
    print(file=sys.stderr)
    return network


def main() -> None:
    """Train, evaluate, prove and write the model."""
    parser = argparse.ArgumentParser(
        prog="scripts/train-digits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-store", type=Path, default=Path("model_repository"), help="where to write digits/")
    parser.add_argument("--version", type=int, default=1, help="version number to write; must not exist yet")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help="passes over the training data")
    parser.add_argument("--samples", type=Path, default=Path("docs/digits"), help="where to write sample images")
    options = parser.parse_args()

    digits = load_digits()
    images = [digit_image(digit, IMAGE_SIDE) for digit in digits.images]
    samples = np.stack([load_sample(image, PREPROCESS) for image in images])
    training, test = train_test_split(
        np.arange(len(samples)), test_size=0.25, random_state=SEED, stratify=digits.target
    )
    network = train_network(
        torch.from_numpy(samples[training]), torch.from_numpy(digits.target[training]), options.epochs
    )

    probabilities = run_module(network, samples[test])
    accuracy = float((probabilities.argmax(axis=1) == digits.target[test]).mean())
    print(f"test accuracy {accuracy:.4f} on {len(test)} held-out images", file=sys.stderr)
    if accuracy < MIN_ACCURACY:
        sys.exit(f"train-digits: accuracy below {MIN_ACCURACY}: nothing written")

    folder = options.model_store / "digits"
    with tempfile.TemporaryDirectory() as temporary:
        graph = Path(temporary) / "digits.onnx"
        export_graph(network, samples[0], graph)
        source = SourceInfo(
            description=f"DigitsNet trained on scikit-learn's digits, {len(training)} images, seed {SEED}",
            command=f"scripts/train-digits --epochs {options.epochs}",
            libraries=("torch", "onnx", "onnxruntime", "scikit-learn", "numpy", "pillow"),
            metrics={"test_accuracy": round(accuracy, 4), "test_images": len(test)},
            preprocess=PREPROCESS,
            labels=CLASSES,
        )
        sample = ReferenceSamples(feeds={"INPUT_0": samples[test]}, outputs={"OUTPUT_0": probabilities})
        manifest = prove_and_write(graph, source, sample, folder, options.version)
    print(manifest.verification[0].verdict, file=sys.stderr)

    options.samples.mkdir(parents=True, exist_ok=True)
    for digit in SAMPLE_DIGITS:
        row = next(row for row in test if digits.target[row] == digit)
        images[row].save(options.samples / f"{CLASSES[digit]}.png")


if __name__ == "__main__":
    main()
