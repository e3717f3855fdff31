"""The Ray of a run."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphkiln_backend.scoring import cluster, preflight
from graphkiln_backend.scoring.cluster import Node, connect, room_of
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.preflight import examine_node


def test_a_client_address_is_refused_with_what_to_name() -> None:
    with pytest.raises(ScoringError, match="HOST:6379"), connect("ray://head:10001"):
        raise AssertionError("it connected")


def test_a_cluster_that_is_not_there_is_told() -> None:
    with pytest.raises(ScoringError, match=r"no Ray cluster can be used at 127\.0\.0\.1:1"), connect("127.0.0.1:1"):
        raise AssertionError("it connected")


def test_a_machine_on_which_ray_does_not_start_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray says it with a plain `Exception`, after a minute on a machine that is too busy."""
    import ray

    def fail(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")  # noqa: TRY002

    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ScoringError, match="Ray does not start on this machine: The current node timed out") as caught:
        connect("").__enter__()
    assert "the same command tries again" in caught.value.hint


@pytest.mark.parametrize("address", ["", "auto", "127.0.0.1:6379", "localhost:6379", "10.1.2.3:6379"])
def test_a_ray_that_is_in_use_is_used(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, "10.1.2.3:6379")
    with connect(address):
        pass


@pytest.mark.parametrize("address", ["10.1.2.4:6379", "127.0.0.1:6380", "ray://head:10001"])
def test_another_one_than_that_in_use_is_refused(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run went to the one in use without a word."""
    use(monkeypatch, "10.1.2.3:6379")
    with pytest.raises(ScoringError, match=r"connected to the Ray at 10\.1\.2\.3:6379, not to "), connect(address):
        raise AssertionError("it connected")


def use(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    """Has this process look like one that uses a Ray."""
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address=address))


@pytest.mark.slow
def test_a_deep_temporary_folder_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket's path has 107 characters at most; Ray puts its sockets deep below its folder."""
    import ray

    for length in (18, 19, 60):
        parent = Path("/tmp") / ("t" * (length - len("/tmp/")))
        parent.mkdir()
        try:
            monkeypatch.setattr(tempfile, "tempdir", str(parent))
            with connect(""):
                assert ray.is_initialized()
            assert list(parent.iterdir()) == []
        finally:
            parent.rmdir()
    assert not list(tmp_path.iterdir())


# How many workers a node has room for.


def node(cores: int, gpus: int = 0) -> Node:
    return Node(id="a", name="node", cores=cores, gpus=gpus)


@pytest.mark.parametrize(
    ("found", "per_worker", "on_gpu", "expected"),
    [
        (node(8), 0, False, (1, 8, 0)),
        (node(8), 2, False, (4, 2, 0)),
        (node(7), 2, False, (3, 2, 0)),
        (node(2), 16, False, (1, 2, 0)),
        (node(0), 2, False, (0, 0, 0)),
        (node(64, 8), 0, True, (8, 8, 1)),
        (node(64, 8), 0, False, (1, 64, 0)),
        (node(64, 8), 16, True, (4, 16, 1)),
        (node(16), 4, True, (4, 4, 0)),
        (node(2, 4), 0, True, (0, 0, 1)),
    ],
)
def test_room(found: Node, per_worker: int, on_gpu: bool, expected: tuple[int, int, int]) -> None:
    room = room_of(found, per_worker, on_gpu=on_gpu)
    assert (room.workers, room.cores, room.gpus) == expected


# What a node is told that cannot take part.

HERE = version("graphkiln")


def test_a_node_like_this_one_takes_part(tmp_path: Path) -> None:
    assert examine_node(HERE, str(tmp_path)) == ""
    assert examine_node(HERE, "") == ""


def test_another_version_is_told_with_what_to_install() -> None:
    assert "install 'graphkiln[score]==9.9'" in examine_node("9.9", "")


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert f"it cannot read {tmp_path / 'none'}: mount" in examine_node(HERE, str(tmp_path / "none"))


def test_it_runs_where_graphkiln_is_not_installed() -> None:
    source = Path(preflight.__file__).read_text()
    program = f"{source}\nprint(examine_node('1.0', ''))"
    told = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True).stdout
    assert "it has no graphkiln in its Python environment" in told
