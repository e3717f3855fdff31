"""The facts without which a figure is worth nothing: machine, versions, model, date."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from platform import python_version, release, system
from typing import Any

import psutil

from graphkiln.story.request import Platform, StoryRequest
from graphkiln_backend.engines.hardware import gpus, identity
from graphkiln_backend.graph.device import CPU

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
        "versions": ", ".join(f"{name} {found}" for name in _LIBRARIES if (found := _version(name))),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
