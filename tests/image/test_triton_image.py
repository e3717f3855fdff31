"""The image on another Triton, on a stand-in for NVIDIA's: `scripts/test-image --triton` builds and names it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from containers import TRITON_IMAGE, run_in_image, serving
from running import run_command

pytestmark = [pytest.mark.image, pytest.mark.skipif(not TRITON_IMAGE, reason="scripts/test-image --triton builds it")]


def test_it_has_an_edge_an_inventory_and_no_second_triton() -> None:
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


def test_numpy_2_is_refused_on_the_triton_of_the_stand_in(repository: Path) -> None:
    """Its stubs are of 24.10; those of NVIDIA's present images know numpy 2."""
    store = ("--network", "none", "-v", f"{repository / 'model_repository'}:/models:ro")
    finished = run_in_image(store, "graphkiln", "serve", image=TRITON_IMAGE)
    assert finished.returncode == 2
    assert "the stubs of Triton 2.51.0 (24.10) support numpy 1 only" in finished.stderr


def test_it_serves_on_the_triton_of_its_base(repository: Path) -> None:
    store = ("-v", f"{repository / 'model_repository'}:/models:ro")
    with serving(store, "--model-store=/models", image=f"{TRITON_IMAGE}-serving") as container:
        sample = repository / "docs" / "digits" / "seven.png"
        finished = run_command("classify", sample, "--model", "digits", "--url", container.url, "--json")
        assert json.loads(finished.stdout)[0]["classifications"][0]["label"] == "seven", finished.stderr
        code, seconds = container.stop()
    assert code == 0
    assert seconds < 5
