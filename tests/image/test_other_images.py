"""The images of the targets `remote`, `store`, `gpu` and `triton`. `scripts/test-image` builds and names them."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from containers import (
    GPU_IMAGE,
    REMOTE_IMAGE,
    STORE_IMAGE,
    TRITON_IMAGE,
    classify_seven,
    pods_volume,
    run_in_image,
    serving,
)
from object_store import CREDENTIALS, ObjectStore

pytestmark = pytest.mark.image

# Libraries of the driver, which NVIDIA's container toolkit mounts.
HOSTS = {"libcuda.so.1", "libnvidia-ml.so.1"}
PROVIDER = "/opt/graphkiln/lib/python3.11/site-packages/onnxruntime/capi/libonnxruntime_providers_cuda.so"
MISSING = re.compile(r"^\s*(\S+) => not found", re.MULTILINE)
PROVIDERS = "import json, onnxruntime; print(json.dumps(onnxruntime.get_available_providers()))"


@pytest.fixture
def store(repository: Path) -> tuple[str, ...]:
    return ("-v", f"{repository / 'model_repository'}:/models:ro")


@pytest.mark.skipif(not REMOTE_IMAGE, reason="the image was not built: scripts/test-image --remote")
def test_remote_serves_a_store_in_s3_and_keeps_the_copy(repository: Path) -> None:
    """As the overlay `s3` does, with a volume of a pod."""
    model = repository / "model_repository" / "digits"
    with ObjectStore() as objects, pods_volume() as volume:
        for path in sorted(path for path in model.rglob("*") if path.is_file()):
            objects.bucket("models").upload_file(str(path), f"store/digits/{path.relative_to(model)}")
        keys = [option for name, value in CREDENTIALS.items() for option in ("-e", f"{name}={value}")]
        options = (*keys, "-e", "GRAPHKILN_TRUSTED_VOLUME=/cache", "-v", f"{volume}:/cache")
        address = f"--model-store=s3://{objects.address}/models/store"
        poll = ("--model-control-mode=poll", "--repository-poll-secs=30")
        with serving(options, address, "--cache=/cache", *poll, image=REMOTE_IMAGE) as container:
            classify_seven(container.url)
            assert "digits" in container.exec("sh", "-c", "ls /cache/stores/*/models")
            assert container.stop()[0] == 0


@pytest.mark.skipif(not STORE_IMAGE, reason="the image was not built: scripts/test-image builds it")
def test_store_serves_its_models_without_a_volume() -> None:
    with serving((), "--model-store=/models", image=STORE_IMAGE) as container:
        classify_seven(container.url)
        assert container.stop()[0] == 0


@pytest.mark.skipif(not STORE_IMAGE, reason="the image was not built: scripts/test-image builds it")
def test_the_user_of_store_cannot_change_it() -> None:
    writing = "find /models -user graphkiln -o -perm -o+w ! -type l | head -1; touch /models/x 2>&1 || true"
    printed = run_in_image(("--network", "none"), "sh", "-c", writing, image=STORE_IMAGE).stdout
    assert printed == "touch: cannot touch '/models/x': Permission denied\n"


def gpu_printed(*command: str) -> str:
    finished = run_in_image(("--network", "none"), *command, image=GPU_IMAGE)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.skipif(not GPU_IMAGE, reason="the image was not built: scripts/test-image --gpu")
def test_gpu_finds_its_libraries() -> None:
    """All but those of the host; no kernel runs here."""
    assert set(MISSING.findall(gpu_printed("ldd", PROVIDER))) <= HOSTS
    without = gpu_printed("env", "-u", "LD_LIBRARY_PATH", "ldd", PROVIDER)
    assert "libcublas.so.13" in MISSING.findall(without)
    gpu_printed("python3", "-c", "import ctypes; ctypes.CDLL('libcudnn.so.9')")  # opened by name on first use
    assert "CUDAExecutionProvider" in json.loads(gpu_printed("python3", "-c", PROVIDERS))


@pytest.mark.skipif(not GPU_IMAGE, reason="the image was not built: scripts/test-image --gpu")
def test_gpu_serves_on_cores_without_a_gpu(store: tuple[str, ...]) -> None:
    with serving(store, "--model-store=/models", image=GPU_IMAGE) as container:
        classify_seven(container.url)
        assert container.stop()[0] == 0


@pytest.mark.skipif(not TRITON_IMAGE, reason="scripts/test-image --triton builds it")
def test_triton_has_an_edge_an_inventory_and_no_second_triton() -> None:
    """On a stand-in for NVIDIA's image."""
    program = (
        "import importlib.util, json, os, pathlib, shutil, numpy\n"
        "parts = json.loads(pathlib.Path('/opt/graphkiln/sbom.cdx.json').read_text())['components']\n"
        "print(json.dumps({\n"
        "    'user': os.getuid(), 'haproxy': bool(shutil.which('haproxy')),\n"
        "    'wheel': importlib.util.find_spec('pytriton'),\n"
        "    'numpy': int(numpy.__version__[0]), 'named': any(part['name'] == 'numpy' for part in parts)}))\n"
    )
    finished = run_in_image(("--network", "none"), "python3", "-c", program, image=TRITON_IMAGE)
    expected = {"user": 1000, "haproxy": True, "wheel": None, "numpy": 2, "named": True}
    assert json.loads(finished.stdout) == expected, finished.stderr


@pytest.mark.skipif(not TRITON_IMAGE, reason="scripts/test-image --triton builds it")
def test_triton_refuses_numpy_2_on_the_stand_in(store: tuple[str, ...]) -> None:
    """Its stubs are those of 24.10; current images of NVIDIA support numpy 2."""
    finished = run_in_image(("--network", "none", *store), "graphkiln", "serve", image=TRITON_IMAGE)
    assert finished.returncode == 2
    assert "the stubs of Triton 2.51.0 (24.10) support numpy 1 only" in finished.stderr


@pytest.mark.skipif(not TRITON_IMAGE, reason="scripts/test-image --triton builds it")
def test_triton_serves_on_its_base(store: tuple[str, ...]) -> None:
    with serving(store, "--model-store=/models", image=f"{TRITON_IMAGE}-serving") as container:
        classify_seven(container.url)
        code, seconds = container.stop()
    assert code == 0
    assert seconds < 5
