"""Train the weights of `graphkiln story`: a torchvision classifier on scikit-learn's handwritten digits.

Random weights cannot show what a lower precision costs; weights after a few minutes of training on two cores can. The
image size grows in three stages, the arithmetic is bf16 if the processor supports it, and at the end the statistics of
the batch norms are recomputed at the full size.

Source: Touvron et al., "Fixing the train-test resolution discrepancy", 2019 (statistics at the final size).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from graphkiln.story.digits import CLASSES, Digits, split_digits
from graphkiln.story.variants import weights_path
from graphkiln_backend.graph.preprocess import Preprocess
from graphkiln_backend.images.decoding import load_sample
from graphkiln_converters.torch_libraries import import_torchvision
from training.augmentation import random_affine

SEED = 20260101
# Image size for a final size of 224, optimizer steps, and strength of the augmentation.
STAGES = ((64, 150, 1.0), (128, 80, 1.0), (224, 70, 0.3))
BATCH = 32
LEARNING_RATE = 1e-3
MIN_ACCURACY = 0.95


def load_pixels(digits: Digits, image_size: int) -> torch.Tensor:
    """Load images in gray with the client's preprocessing, float32 `[images, 1, size, size]` in 0..1."""
    spec = Preprocess(resize=round(image_size * 232 / 224), crop=(image_size, image_size), color="L")
    return torch.from_numpy(np.stack([load_sample(jpeg, spec) for jpeg in digits.jpegs]))


def normalize(samples: torch.Tensor, published: Preprocess) -> torch.Tensor:
    """Convert to the model's input, `[images, 3, size, size]`, with the published mean and standard deviation."""
    mean, std = (torch.tensor(values).view(1, 3, 1, 1) for values in (published.mean, published.std))
    image: torch.Tensor = ((samples - mean) / std).contiguous(memory_format=torch.channels_last)
    return image


def build_network(architecture: str) -> nn.Module:
    """Build a network with ten classes; residual branches start at zero if supported, which trains much faster."""
    residual = architecture.startswith(("resnet", "resnext", "wide_resnet"))
    options = {"zero_init_residual": True} if residual else {}
    module: nn.Module = import_torchvision().models.get_model(architecture, num_classes=len(CLASSES), **options)
    return module.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def train(
    module: nn.Module, samples: torch.Tensor, targets: torch.Tensor, published: Preprocess, effort: float
) -> None:
    """Train in stages of increasing image size, each with its own one-cycle schedule."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = [round(side * samples.shape[-1] / 224 / 32) * 32 or 32 for side, _, _ in STAGES]
    counts = [max(2, round(steps * effort)) for _, steps, _ in STAGES]
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=1e-2)
    started = time.perf_counter()
    module.train()
    for side, steps, (_, _, strength) in zip(sizes, counts, STAGES, strict=True):
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=LEARNING_RATE, total_steps=steps)
        for step in range(1, steps + 1):
            rows = torch.randint(len(samples), (BATCH,), generator=generator)
            scale = (1 - 0.15 * strength, 1 + 0.15 * strength)
            augmented = random_affine(
                samples[rows], side, angle=0.2 * strength, scale=scale, shift=0.1 * strength, generator=generator
            )
            batch = normalize(augmented, published)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = nn.functional.cross_entropy(module(batch), targets[rows])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            schedule.step()
            seconds = time.perf_counter() - started
            line = f"{side} pixels: step {step}/{steps}, loss {loss.item():.3f}, {seconds:.0f} s"
            print(f"\r\033[K{line}", end="", file=sys.stderr)
    print(file=sys.stderr)


def recompute_statistics(module: nn.Module, samples: torch.Tensor, published: Preprocess) -> None:
    """Recompute the batch norms' statistics at the final size, without augmentation."""
    norms = [layer for layer in module.modules() if isinstance(layer, nn.BatchNorm2d)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None  # a plain average
    module.train()
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        for batch in torch.split(samples[:512], 64):
            module(normalize(batch, published))
    for norm in norms:
        norm.momentum = 0.1


def top1_accuracy(module: nn.Module, samples: torch.Tensor, targets: torch.Tensor, published: Preprocess) -> float:
    """Compute the top-1 accuracy in fp32."""
    module.eval()
    with torch.inference_mode():
        predictions = torch.cat([module(normalize(batch, published)).argmax(1) for batch in torch.split(samples, 32)])
    return float((predictions == targets).float().mean())


def main() -> None:
    """Train, evaluate and write the weights."""
    parser = argparse.ArgumentParser(
        prog="scripts/train-story", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="resnet101", help="a classifier of torchvision (default: resnet101)")
    parser.add_argument("--image-size", type=int, default=224, help="side of its images (default: 224)")
    parser.add_argument("--effort", type=float, default=1.0, help="share of the usual steps (default: 1)")
    parser.add_argument("--output", type=Path, help="where to write (default: where graphkiln story looks)")
    options = parser.parse_args()

    published = Preprocess(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    training, held_out = split_digits()
    samples = load_pixels(training, options.image_size)
    torch.manual_seed(SEED)
    module = build_network(options.model)
    started = time.perf_counter()
    train(module, samples, torch.from_numpy(training.targets), published, options.effort)
    recompute_statistics(module, samples, published)
    held_out_samples = load_pixels(held_out, options.image_size)
    accuracy = top1_accuracy(module, held_out_samples, torch.from_numpy(held_out.targets), published)
    seconds = time.perf_counter() - started
    print(f"{accuracy:.4f} of {len(held_out.targets)} held-out digits right, after {seconds:.0f} s", file=sys.stderr)
    if accuracy < MIN_ACCURACY:
        sys.exit(f"train-story: accuracy below {MIN_ACCURACY}: nothing written; try more --effort")
    path = options.output or weights_path(options.model, options.image_size)
    save_weights(module, path)
    print(f"wrote {path}", file=sys.stderr)


def save_weights(module: nn.Module, path: Path) -> None:
    """Write the state dict atomically as safetensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    save_file({key: value.contiguous() for key, value in module.state_dict().items()}, partial)
    partial.rename(path)


if __name__ == "__main__":
    main()
