"""Request of a story, the platform that it runs on, and facts about both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version, release, system
from typing import Any

import psutil

from graphkiln_backend.cache.settings import user_cache_folder
from graphkiln_backend.engines.hardware import gpus, identity
from graphkiln_backend.graph.device import CPU, Device
from graphkiln_backend.graph.modules import installed_version
from graphkiln_backend.graph.precision import Precision

# Folder of all stories and of the trained weights, in the user's cache.
STORY_CACHE = "graphkiln-story"
# Distributions whose versions are facts of a figure.
_LIBRARIES = (
    "graphkiln",
    "torch",
    "onnx",
    "onnxruntime",
    "onnxruntime-gpu",
    "openvino",
    "nvidia-pytriton",
    "numpy",
    "pillow",
)


def weights_path(architecture: str, image_size: int) -> Path:
    """File that `scripts/train-story` writes the weights of an architecture to, and `graphkiln story` reads."""
    return user_cache_folder(STORY_CACHE) / f"{architecture}-digits-{image_size}.safetensors"


def find_trained_weights(source: str, image_size: int) -> Path | None:
    """The weights that `scripts/train-story` left for a source, or None."""
    kind, _, architecture = source.partition(":")
    path = weights_path(architecture, image_size)
    return path if kind == "torchvision" and path.is_file() else None


@dataclass(frozen=True, kw_only=True, slots=True)
class StoryRequest:
    """The options of `graphkiln story` that decide what is measured.

    Attributes:
        source: The model, as `graphkiln convert` takes it.
        image_size: Side of its images in pixels.
        weights: State dict, or None for random weights.
        gradient: Keep the gradient with respect to the image in the graph.
        samples: Folder of JPEGs to prove and measure on, or None for the held-out digits.
        preprocess: Preprocessing of an image, as JSON data, for a source without one.
    """

    source: str
    image_size: int
    weights: Path | None
    gradient: bool
    samples: Path | None
    preprocess: dict[str, Any] | None = None

    @property
    def folder(self) -> Path:
        """Folder of the graphs and measurements of this request; another request has another folder."""
        weights = "" if self.weights is None else f"{self.weights.resolve()} {self.weights.stat().st_mtime_ns}"
        facts = {"source": self.source, "size": self.image_size, "weights": weights, "gradient": self.gradient}
        facts |= {"samples": str(self.samples and self.samples.resolve()), "preprocess": self.preprocess or {}}
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
        return user_cache_folder(STORY_CACHE) / digest


@dataclass(frozen=True, kw_only=True, slots=True)
class Platform:
    """Device and batch size of a story.

    Attributes:
        device: Device.
        batch: Largest batch that Triton forms.
    """

    device: Device
    batch: int

    @property
    def mixed_precision(self) -> Precision:
        """The 16-bit type in which the device computes products fastest."""
        return Precision.FP16 if self.device.is_gpu else Precision.BF16

    @property
    def instance_group(self) -> str:
        """Two instances, as config.pbtxt writes it."""
        kind = "KIND_GPU" if self.device.is_gpu else "KIND_CPU"
        return f"instance_group {{ count: 2 kind: {kind} }}"

    @property
    def callers(self) -> int:
        """Concurrent requests: a full batch for each of two instances, and a third that is being formed."""
        return 3 * self.batch


def this_platform() -> Platform:
    """A GPU where there is one; batches of 64 there (as the source of the story), of 8 on a CPU."""
    device = Device.gpu() if gpus() else CPU
    return Platform(device=device, batch=64 if device.is_gpu else 8)


def story_facts(request: StoryRequest, platform: Platform) -> dict[str, Any]:
    """Facts about a story, for people, as plain data."""
    return {
        "model": request.source,
        "image size": request.image_size,
        "weights": str(request.weights) if request.weights else "random: nothing is decided by them",
        "gradient": "by the image, in every graph" if request.gradient else "none after step 1",
        "batches": f"up to {platform.batch}, two instances",
        **machine_facts(),
    }


def machine_facts() -> dict[str, Any]:
    """Facts about this machine and its software, and the date."""
    processor = identity(CPU).partition(", instruction sets")[0]
    memory = psutil.virtual_memory().total / 2**30
    return {
        "machine": f"{processor}, {psutil.cpu_count()} cores, {memory:.0f} GiB",
        "gpu": ", ".join(str(gpu) for gpu in gpus()) or "none",
        "system": f"{system()} {release()}, Python {python_version()}",
        "versions": ", ".join(f"{name} {found}" for name in _LIBRARIES if (found := installed_version(name))),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }
