"""Connecting to a Ray cluster, and the check of its nodes. Nothing here starts Ray."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError, RayError

from graphkiln_backend.scoring import fleet
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.ray_cluster import RayCluster, connect, node_check

HERE = version("graphkiln")


@pytest.mark.parametrize(
    ("address", "message"), [("ray://head:10001", "HOST:6379"), ("127.0.0.1:1", r"no Ray cluster .*127\.0\.0\.1:1")]
)
def test_unusable_address_is_refused(address: str, message: str) -> None:
    with pytest.raises(ScoringError, match=message):
        connect(address).__enter__()


@pytest.mark.parametrize("address", ["", "auto", "127.0.0.1:6379", "localhost:6379", "10.1.2.3:6379"])
def test_existing_connection_is_used(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_connection(monkeypatch)
    with connect(address):
        pass


@pytest.mark.parametrize("address", ["10.1.2.4:6379", "127.0.0.1:6380", "ray://head:10001"])
def test_connection_to_another_cluster_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_connection(monkeypatch)
    with pytest.raises(ScoringError, match=r"10\.1\.2\.3:6379"):
        connect(address).__enter__()


def pretend_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="10.1.2.3:6379"))


def test_node_check(tmp_path: Path) -> None:
    check = node_check()
    assert check(HERE, str(tmp_path)) == ""
    assert check(HERE, "") == ""
    assert "install 'graphkiln[score]==9.9'" in check("9.9", "")
    assert f"cannot read {tmp_path / 'none'}: mount" in check(HERE, str(tmp_path / "none"))


def test_node_check_runs_where_graphkiln_is_not_installed() -> None:
    pickled = ray.cloudpickle.dumps(node_check())
    program = f"""
import importlib.metadata, pickle, sys
def missing(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = missing
sys.modules["graphkiln_backend"] = None
print(pickle.loads({pickled!r})("1.0", ""))
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "it has no graphkiln in its Python environment" in printed


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OutOfMemoryError("low on memory"), fleet.WorkerLost(fleet.OUT_OF_MEMORY, "")),
        (RayActorError(error_msg="gone"), fleet.WorkerLost(fleet.CRASHED, "")),
        (RayError("odd"), fleet.CallFailed("odd")),
    ],
)
def test_errors_of_ray_are_those_of_a_fleet(
    error: Exception, expected: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(_: object) -> None:
        raise error

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(type(expected), match=str(error)) as caught:
        RayCluster().result("call")
    assert getattr(caught.value, "reason", "") == getattr(expected, "reason", "")
