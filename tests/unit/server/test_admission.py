"""Proving a version in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import NoReturn

import pytest
import zoo

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.repository.config import BACKEND, write_config
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.server import admission as module
from graphkiln_backend.server.admission import Candidate, Verdict, admit
from graphkiln_backend.system.signals import ServerStopping


@pytest.fixture
def candidate(tmp_path: Path) -> Candidate:
    folder = zoo.add(tmp_path / "store", "m", zoo.scale(("batch", 3)))
    config = tmp_path / "config.pbtxt"
    write_config(complete_config(folder.parent, frozenset({BACKEND}), lambda version: version), config)
    return Candidate(folder=folder, config=config, cache=CacheSettings(), temporary=tmp_path)


def check_nothing_is_left(candidate: Candidate) -> None:
    assert multiprocessing.active_children() == []
    assert not list(candidate.temporary.glob("admission-*"))


def test_a_good_version(candidate: Candidate) -> None:
    verdict = admit(candidate, deadline_s=60)
    assert verdict.reason == ""
    assert "onnxruntime on cpu" in verdict.words
    check_nothing_is_left(candidate)


def test_a_damaged_version(candidate: Candidate) -> None:
    (candidate.folder / "model.onnx").write_bytes(b"PK")
    assert "model.onnx" in module._outcome(candidate)[0]


def test_a_graph_that_no_engine_runs(candidate: Candidate) -> None:
    graph = zoo.scale(("batch", 3))
    graph.graph.node[0].op_type = "Nonsense"
    (candidate.folder / "model.onnx").write_bytes(graph.SerializeToString())
    assert "Nonsense" in module._outcome(candidate)[0]


def test_any_error_is_a_reason(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Candidate) -> NoReturn:
        raise ZeroDivisionError("by a graph")

    monkeypatch.setattr(module, "_build", fail)
    assert module._outcome(candidate) == ("ZeroDivisionError: by a graph", "")


class FakeReceiver:
    def __init__(self, process: object) -> None:
        self.process = process

    def poll(self, timeout_s: float) -> bool:
        time.sleep(min(timeout_s, 0.01))
        return False


def wait(*, deadline_s: float, stopped: bool = False) -> Verdict:
    return module._wait(FakeReceiver(None), None, deadline_s, lambda: stopped)  # type: ignore[arg-type]


def test_one_that_never_finishes() -> None:
    assert wait(deadline_s=0.02).reason == "its loading did not finish within 0.02 s"


def test_a_server_that_stops_waits_for_none() -> None:
    with pytest.raises(ServerStopping):
        wait(deadline_s=60, stopped=True)


def test_a_crash_is_named(candidate: Candidate, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_prove", _crash)
    reason = admit(candidate, deadline_s=60).reason
    assert reason == "the process that loaded it was ended by signal 11 (SIGSEGV)"
    check_nothing_is_left(candidate)


def _crash(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def test_an_exit_is_named() -> None:
    assert module._ending(3) == "ended with code 3"
