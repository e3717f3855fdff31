"""Trains the decisive weights of `graphkiln story`: a torchvision classifier on scikit-learn's handwritten digits.

Random weights decide nothing: their answers cannot show what a lower precision costs. These do, after a few minutes on
two cores. Images grow in three stages, the arithmetic is bf16 where the processor has it, and at the end the batch
norms' statistics are taken once more at the full size.

Source: Touvron et al., "Fixing the train-test resolution discrepancy", 2019 (statistics at the size of use).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from augmenting import moved
from safetensors.torch import save_file
from torch import nn

from graphkiln.story.digits import CLASSES, Digits, training_and_held_out, weights_path
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_converters.torch_libraries import import_torchvision

SEED = 20260101
STAGES = ((64, 150, 1.0), (128, 80, 1.0), (224, 70, 0.3))
"""Side of the images as trained for 224, steps, and how far images are turned, scaled and shifted."""
BATCH = 32
LEARNING_RATE = 1e-3
LEAST_ACCURACY = 0.95


def pixels(digits: Digits, image_size: int) -> torch.Tensor:
    """One channel of the images as the client makes them, `[images, 1, size, size]` in 0..1: all are equal."""
    spec = Preprocess(resize=round(image_size * 232 / 224), crop=(image_size, image_size), color="L")
    return torch.from_numpy(np.stack([load_sample(jpeg, spec) for jpeg in digits.jpegs]))


def normalized(samples: torch.Tensor, published: Preprocess) -> torch.Tensor:
    """As the model takes them: three channels, mean and standard deviation as published."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (published.mean, published.std))
    image: torch.Tensor = ((samples - mean) / std).contiguous(memory_format=torch.channels_last)
    return image


def network(architecture: str) -> nn.Module:
    """Ten classes; residual branches that start at zero, where the architecture offers it: it trains far sooner."""
    residual = architecture.startswith(("resnet", "resnext", "wide_resnet"))
    options = {"zero_init_residual": True} if residual else {}
    module: nn.Module = import_torchvision().models.get_model(architecture, num_classes=len(CLASSES), **options)
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def train(
    module: nn.Module, samples: torch.Tensor, targets: torch.Tensor, published: Preprocess, effort: float
) -> None:
    """Stage by stage, each with a rise and fall of the learning rate of its own: every size has to be learned anew."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = [round(side * samples.shape[-1] / 224 / 32) * 32 or 32 for side, _, _ in STAGES]
    counts = [max(2, round(steps * effort)) for _, steps, _ in STAGES]
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
    begun = time.perf_counter()
    module.train()
    for side, steps, (_, _, strength) in zip(sizes, counts, STAGES, strict=True):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
        for step in range(1, steps + 1):
            rows = torch.randint(len(samples), (BATCH,), generator=generator)
            reach = (1 - 0.15 * strength, 1 + 0.15 * strength)
            turned = moved(
                samples[rows], side, angle=0.2 * strength, scale=reach, shift=0.1 * strength, generator=generator
            )
            batch = normalized(turned, published)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(module(batch), targets[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            seconds = time.perf_counter() - begun
            line = f"{side} pixels: step {step}/{steps}, loss {loss.item():.3f}, {seconds:.0f} s"
            print(f"\r\033[K{line}", end="", file=sys.stderr)
    print(file=sys.stderr)


def retake_statistics(module: nn.Module, samples: torch.Tensor, published: Preprocess) -> None:
    """Batch norms as they are at the size of use, averaged over images that are not turned or shifted."""
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
    module.train()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in torch.split(samples[:512], 64):
            module(normalized(batch, published))
    for norm in norms:
        norm.momentum = 0.1


def accuracy(module: nn.Module, samples: torch.Tensor, targets: torch.Tensor, published: Preprocess) -> float:
    """In fp32."""
    module.eval()
    with torch.inference_mode():
        answers = torch.cat([module(normalized(batch, published)).argmax(1) for batch in torch.split(samples, 32)])
    return float((answers == targets).float().mean())


def main() -> None:
    """Trains, measures, writes."""
    parser = argparse.ArgumentParser(
        prog="scripts/train-story", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet101", help="a classifier of torchvision (default: resnet101)")
    parser.add_argument("--image-size", type=int, default=224, help="side of its images (default: 224)")
    parser.add_argument("--effort", type=float, default=1.0, help="share of the usual steps (default: 1)")
    parser.add_argument("--output", type=Path, help="where to write (default: where graphkiln story looks)")
    options = parser.parse_args()

    published = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    training, held_out = training_and_held_out()
    samples, targets = pixels(training, options.image_size), torch.from_numpy(training.targets)
    torch.manual_seed(SEED)
    module = network(options.model)
    begun = time.perf_counter()
    train(module, samples, targets, published, options.effort)
    retake_statistics(module, samples, published)
    found = accuracy(module, pixels(held_out, options.image_size), torch.from_numpy(held_out.targets), published)
    seconds = time.perf_counter() - begun
    print(f"{found:.4f} of {len(held_out.targets)} held-out digits right, after {seconds:.0f} s", file=sys.stderr)
    if found < LEAST_ACCURACY:
        sys.exit(f"train-story: accuracy below {LEAST_ACCURACY}: nothing written; try more --effort")
    path = options.output or weights_path(options.model, options.image_size)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, partial)
    partial.rename(path)
    print(f"wrote {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
