"""The image of the target `gpu`, as far as a machine without a GPU can tell: its libraries are found, and it serves.

What the host brings (`libcuda`, `libnvidia-ml`) is not in it, and no kernel runs.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from containers import GPU_IMAGE, run_in_image, serving
from running import run_command

pytestmark = [
    pytest.mark.image,
    pytest.mark.skipif(not GPU_IMAGE, reason="the image was not built: scripts/test-image --gpu"),
]

HOSTS = {"libcuda.so.1", "libnvidia-ml.so.1"}
"""Of the driver: NVIDIA's container toolkit mounts them."""
PROVIDER = "/opt/graphkiln/lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so"
MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
PROVIDERS = "import json, onnxruntime; print(json.dumps(onnxruntime.get_available_providers()))"


def printed(*command: str) -> str:
    finished = run_in_image(("--network", "none"), *command, image=GPU_IMAGE)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def test_onnx_runtime_finds_cuda_and_cudnn_where_the_image_says_that_they_lie() -> None:
    assert set(MISSING.findall(printed("ldd", PROVIDER))) <= HOSTS
    without = printed("env", "-u", "LD_LIBRARY_PATH", "ldd", PROVIDER)
    assert "libcublas.so.13" in MISSING.findall(without)
    printed(
        "python3", "-c", "import ctypes; ctypes.CDLL('libcudnn.so.9')"
    )  # which is opened by name, when it is needed


def test_it_has_the_provider_for_gpus() -> None:
    assert "CUDAExecutionProvider" in json.loads(printed("python3", "-c", PROVIDERS))


def test_without_a_gpu_it_serves_on_cores(repository: Path) -> None:
    store = ("-v", f"{repository / 'model_repository'}:/models:ro")
    with serving(store, "--model-store=/models", image=GPU_IMAGE) as container:
        sample = repository / "docs" / "digits" / "seven.png"
        asked = run_command("classify", sample, "--model", "digits", "--url", container.url, "--json")
        assert json.loads(asked.stdout)[0]["classifications"][0]["label"] == "seven", asked.stderr
        assert container.stop()[0] == 0
