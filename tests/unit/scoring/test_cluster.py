"""The Ray of a run."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from graphkiln_backend.scoring import cluster
from graphkiln_backend.scoring.cluster import connect
from graphkiln_backend.scoring.errors import ScoringError


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
