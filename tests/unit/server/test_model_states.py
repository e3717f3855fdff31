"""One row for each version: while a server starts, and when it is live."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest
from canned import CannedHttp, http
from running import free_ports
from statuses import instance_status

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.model_states import ModelState, explain, list_models, load_progress
from graphkiln_backend.server.repository_control import RepositoryControl, VersionState
from graphkiln_backend.triton.instance_status import Loading, StatusFile
from graphkiln_backend.triton.snapshot import Snapshot

GONE = 2**22 + 1  # more than the kernel ever gives: no such process. Source: proc(5), `pid_max`


def loading(model: str, version: int, seconds: float, activity: str = "lowering") -> Loading:
    return Loading(pid=1, model=model, version=version, since=time.monotonic() - seconds, activity=activity)


class TestProgress:
    def test_versions_by_name_and_number(self) -> None:
        assert load_progress(Snapshot()) == []
        seen = Snapshot(
            statuses={"a.1": instance_status(model="b", version=3, load_ms=1500.0)},
            loading={"c.2": loading("b", 10, 5, "proving"), "d.3": loading("a", 1, 1)},
        )
        rows = load_progress(seen)
        assert [(row.model, row.version, row.activity) for row in rows] == [
            ("a", 1, "lowering"),
            ("b", 3, "ready"),
            ("b", 10, "proving"),
        ]
        assert rows[1].seconds == 1.5
        assert 5 <= rows[2].seconds < 60
        assert [row.is_ready for row in rows] == [False, True, False]

    def test_one_is_ready_when_all_of_its_instances_are(self) -> None:
        ready = {"m_0.1": instance_status(model="m", version=1, load_ms=90.0)}
        seen = Snapshot(statuses=ready, loading={"m_1.2": loading("m", 1, 2), "m_2.3": loading("m", 1, 7)})
        (row,) = load_progress(seen)
        assert not row.is_ready
        assert row.seconds > 6
        both = {**ready, "m_1.2": instance_status(model="m", version=1, load_ms=900.0)}
        assert [row.seconds for row in load_progress(Snapshot(statuses=both))] == [0.9]

    def test_one_whose_process_was_killed_says_so(self) -> None:
        gone = Loading(pid=GONE, model="m", version=1, since=time.monotonic(), activity="proving")
        seen = Snapshot(loading={"m_0.1": gone}, crashes={"m_0.1": "Fatal Python error: Segmentation fault\n"})
        (row,) = load_progress(seen)
        assert "killed by SIGSEGV while it did this: proving" in row.activity
        assert not row.is_ready


class TestCrashes:
    """Triton's "not healthy" becomes what killed the process."""

    def state(self, reason: str = "Internal: Stub process 'm_0_0' is not healthy.", version: str = "2") -> VersionState:
        return VersionState(model="m", version=version, state="UNAVAILABLE", reason=reason)

    def note(self, folder: Path, pid: int, since: float = 1.0, record: str = "Aborted") -> None:
        text = f'{{"pid": {pid}, "model": "m", "version": 2, "since": {since}, "activity": "lowering"}}'
        (folder / f"m_0.{pid}.loading").write_text(text)
        (folder / f"m_0.{pid}.crash").write_text(f"Fatal Python error: {record}")

    def test_the_newest_of_several_is_named(self, tmp_path: Path) -> None:
        self.note(tmp_path, GONE, since=2.0, record="Bus error")
        self.note(tmp_path, GONE + 1, since=1.0)
        (row,) = explain([self.state()], tmp_path)
        assert "was killed by SIGBUS while it did this: lowering" in row.reason
        assert "not healthy" not in row.reason

    @pytest.mark.parametrize("reason", ["unloaded", "Internal: no such file"])
    def test_another_reason_stays(self, tmp_path: Path, reason: str) -> None:
        self.note(tmp_path, GONE)
        assert explain([self.state(reason)], tmp_path) == [self.state(reason)]

    def test_a_process_that_lives_explains_nothing(self, tmp_path: Path) -> None:
        self.note(tmp_path, os.getpid())
        rows = [self.state(), self.state(version="")]
        assert explain(rows, tmp_path) == rows


def control(port: int) -> RepositoryControl:
    return RepositoryControl(http=ListenAddress(protocol="HTTP", host="127.0.0.1", port=port))


class TestModels:
    def list(
        self,
        folder: Path,
        *rows: dict[str, str],
        status: str = "200 OK",
        refusals: dict[tuple[str, str], str] | None = None,
    ) -> list[ModelState]:
        with CannedHttp([http(json.dumps(rows).encode(), status)]) as server:
            return list_models(control(server.port), folder, refusals or {})

    def test_a_row_for_each_version_with_its_slowest_instance(self, tmp_path: Path) -> None:
        trace = "\n\nAt:\n  /backends/graphkiln/model.py(97): _load\n"
        fast, slow = instance_status(pid=1, load_ms=10), instance_status(pid=2, load_ms=90)
        with StatusFile(tmp_path, "m_0_0", slow), StatusFile(tmp_path, "m_0_1", fast):
            states = self.list(
                tmp_path,
                {"name": "b", "version": "7", "state": "UNAVAILABLE", "reason": f"Internal: no\ngraph{trace}"},
                {"name": "m", "version": "3", "state": "READY"},
            )
        assert states == [
            ModelState(model="b", version="7", state="UNAVAILABLE", reason="no graph", status=None),
            ModelState(model="m", version="3", state="READY", reason="", status=slow),
        ]

    def test_refusals_take_the_place_of_rows_and_what_was_unloaded_is_left_out(self, tmp_path: Path) -> None:
        states = self.list(
            tmp_path,
            {"name": "m", "version": "1", "state": "READY"},
            {"name": "m", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"},
            {"name": "m", "version": "3", "state": "UNLOADING"},
            {"name": "m", "version": "10", "state": "UNAVAILABLE", "reason": "no graph"},
            refusals={("m", "9"): "cut short", ("m", "3"): "crashed"},
        )
        assert [(state.version, state.state, state.reason) for state in states] == [
            ("1", "READY", ""),
            ("3", "REFUSED", "crashed"),
            ("9", "REFUSED", "cut short"),
            ("10", "UNAVAILABLE", "no graph"),
        ]

    def test_without_a_list_versions_with_ready_instances_serve(self, tmp_path: Path, logged: list[str]) -> None:
        with StatusFile(tmp_path, "a", instance_status(pid=1)):
            listed = [
                self.list(tmp_path, status="403 Forbidden"),
                list_models(control(free_ports(1)[0]), tmp_path, {}),
                list_models(None, tmp_path, {}),
            ]
        assert [[(state.model, state.version, state.state) for state in states] for states in listed] == [
            [("m", "3", "READY")]
        ] * 3
        assert len(logged) == 2


def test_a_missing_gpu_names_the_fix(tmp_path: Path) -> None:
    reason = "Invalid argument: instance group m_0 of model m has kind KIND_GPU but no GPUs are available"
    (row,) = explain([VersionState(model="m", version="1", state="UNAVAILABLE", reason=reason)], tmp_path)
    assert row.reason.startswith(reason)
    assert "write kind: KIND_CPU" in row.reason
