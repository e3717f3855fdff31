"""Sixty architectures of timm, twenty of torchvision, twenty of transformers, converted and served.

`scripts/test -m families` writes its results to `docs/families.md`: half an hour on two cores.
"""

from __future__ import annotations

import json
import shutil
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import conversion
import family_report
import numpy as np
import pytest
from architectures import ARCHITECTURES, Architecture
from running import Server, Serving

from graphkiln.story.variants import machine_facts
from graphkiln_client import Client

# The limit of another engine in fp32: the served session is optimized, and PyTorch has other kernels.
_MOST_ERROR = 1e-4
# In units of PyTorch's own error in fp32, if that is larger: random weights may amplify each rounding.
_OWN_ERRORS = 2.0
_LOAD_S = 300.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    (folder / "store").mkdir()
    return folder


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    """One server, which loads and unloads each model."""
    with Serving(folder, "--model-store", folder / "store", "--model-control-mode=explicit") as running:
        running.wait_until(lambda: running.status("/v2/health/live") == 200)
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Client]:
    with Client(server.url, timeout_s=_LOAD_S) as client:
        yield client


@pytest.mark.server
@pytest.mark.families
@pytest.mark.timeout(900)
@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=str)
def test_served_as_eager_pytorch_computes(
    architecture: Architecture, folder: Path, server: Server, client: Client
) -> None:
    family_report.forget(architecture.library, architecture.name)
    try:
        converted = conversion.convert(architecture, folder)
        served = _serve(architecture.name, folder, server, client)
        assert served["error"] <= _MOST_ERROR or served["error"] <= _OWN_ERRORS * conversion.own_error(architecture)
    finally:
        _remove(architecture.name, folder)
    row = {
        "library": architecture.library,
        "architecture": architecture.name,
        "input": f"3x{architecture.side}x{architecture.side}" if architecture.side else "11 tokens",
        "convert s": round(converted["seconds"], 1),
        "load s": round(served["load"], 1),
        "ask ms": round(served["ask"] * 1000, 1),
        "convert MiB": round(converted["mib"]),
        "serve MiB": round(served["mib"]),
        "error": f"{served['error']:.1e}",
    }
    family_report.keep(row, {"machine": _machine(), "imported": round(converted["imported"])})


def _serve(name: str, folder: Path, server: Server, client: Client) -> dict[str, float]:
    """Load a model, send requests and unload it; return its figures."""
    arrays = dict(np.load(folder / f"{name}.npz"))
    feeds = {key: array for key, array in arrays.items() if key.startswith("INPUT")}
    expected = {key: array for key, array in arrays.items() if key.startswith("OUTPUT")}
    begun = time.perf_counter()
    client.load(name)
    load = time.perf_counter() - begun
    try:
        model = client.model(name)
        one = {key: array[:1] for key, array in feeds.items()}
        error = max(
            _error(model.infer(feeds), expected),
            _error(model.infer(one), {key: array[:1] for key, array in expected.items()}),
        )
        ask = statistics.median(_seconds(model, one) for _ in range(10))
        mib = _instance_mib(name, server)
    finally:
        client.unload(name)
    return {"load": load, "error": error, "ask": ask, "mib": mib}


def _seconds(model: Any, feeds: dict[str, np.ndarray]) -> float:
    begun = time.perf_counter()
    model.infer(feeds)
    return time.perf_counter() - begun


def _error(found: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> float:
    """Largest relative L2 of all outputs, none of which may be all zeros."""
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].shape == array.shape, name
        assert np.linalg.norm(array) > 0, f"{name} is zero"
    return max(float(np.linalg.norm(found[name] - array) / np.linalg.norm(array)) for name, array in expected.items())


def _instance_mib(name: str, server: Server) -> float:
    """Peak memory of the process that serves a model."""
    statuses = [json.loads(path.read_text()) for path in server.temporary.glob("graphkiln-*/instances/*.json")]
    pids = {status["pid"] for status in statuses if status.get("model") == name}
    peaks = [line for pid in pids for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "VmHWM" in line]
    return max(int(line.split()[1]) for line in peaks) / 1024


def _remove(name: str, folder: Path) -> None:
    for path in (folder / "store" / name, folder / name):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f"{name}.*"):
        path.unlink()


def _machine() -> str:
    facts = machine_facts()
    return f"{facts['machine']}; {facts['system']}; {facts['date']}; {facts['versions']}"


def test_number_of_architectures() -> None:
    assert Counter(each.library for each in ARCHITECTURES) == {"timm": 60, "torchvision": 20, "transformers": 20}
    assert len(set(map(str, ARCHITECTURES))) == 100
    assert len({each.name for each in ARCHITECTURES if each.library != "torchvision"}) == 80


def test_the_page_is_generated_from_the_results() -> None:
    results = json.loads(family_report.RESULTS.read_text())
    assert family_report.PAGE.read_text() == family_report.render(results)
    assert {(row["library"], row["architecture"]) for row in results["rows"]} <= {
        (each.library, each.name) for each in ARCHITECTURES
    }


def test_a_failed_architecture_loses_its_row(tmp_path: Path) -> None:
    path = tmp_path / "families.json"
    row = dict.fromkeys(family_report.COLUMNS, 1) | {"library": "timm", "architecture": "a"}
    facts = {"machine": "a machine", "imported": 3}
    family_report.keep({**row, "architecture": "b"}, facts, path)
    family_report.keep(row, facts, path)
    family_report.keep({**row, "load s": 2}, facts, path)
    assert [each["load s"] for each in json.loads(path.read_text())["rows"]] == [2, 1]
    family_report.forget("timm", "a", path)
    assert "| timm | b |" in (tmp_path / "families.md").read_text()
    assert "| timm | a |" not in (tmp_path / "families.md").read_text()
