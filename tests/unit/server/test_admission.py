"""Proving a version in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from pathlib import Path

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


def test_it_is_ended_before_what_serves(candidate: Candidate) -> None:
    seen = set()

    def look() -> bool:
        for child in multiprocessing.active_children():
            seen.add(int(Path(f"/proc/{child.pid}/oom_score_adj").read_text()))
        return False

    assert admit(candidate, deadline_s=60, stopped=look).reason == ""
    assert 1000 in seen


def test_a_damaged_version(candidate: Candidate) -> None:
    (candidate.folder / "model.onnx").write_bytes(b"PK")
    assert "model.onnx" in admit(candidate, deadline_s=60).reason


def test_a_graph_that_no_engine_runs(candidate: Candidate) -> None:
    graph = zoo.scale(("batch", 3))
    graph.graph.node[0].op_type = "Nonsense"
    (candidate.folder / "model.onnx").write_bytes(graph.SerializeToString())
    assert "Nonsense" in admit(candidate, deadline_s=60).reason


def test_any_error_is_a_reason(candidate: Candidate) -> None:
    folder = candidate.folder.rename(candidate.folder.with_name("no number"))
    assert admit(replace(candidate, folder=folder), deadline_s=60).reason.startswith("ValueError: invalid literal")


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


@pytest.mark.parametrize(
    ("end", "ending"), [("_crash", "was ended by signal 11 (SIGSEGV)"), ("_exit", "ended with code 3")]
)
def test_a_crash_is_named(candidate: Candidate, monkeypatch: pytest.MonkeyPatch, end: str, ending: str) -> None:
    monkeypatch.setattr(module, "_prove", globals()[end])
    assert admit(candidate, deadline_s=60).reason == f"the process that loaded it {ending}"
    check_nothing_is_left(candidate)


def _crash(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _exit(*_: object) -> None:
    os._exit(3)
