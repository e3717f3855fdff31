"""Steps of rollouts on a fake Triton: what is shown and loaded, what instances are told, what ends a rollout."""

from __future__ import annotations

import errno
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import onnx
import pytest
import zoo
from fake_repository import FakeTriton
from statuses import instance_status

from graphkiln_backend.repository.config import BACKEND, DROP_IN_BACKEND, IDLE_CORES, ModelConfigProto, read_config
from graphkiln_backend.server import rollout_loop as module
from graphkiln_backend.server import rollouts
from graphkiln_backend.server.admission import Verdict
from graphkiln_backend.server.flags import ControlMode, ListenAddress
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.rollout_loop import RolloutController
from graphkiln_backend.server.rollouts import (
    Gates,
    Latencies,
    Phase,
    Progress,
    RolloutFolder,
    Rollouts,
    Wanted,
    first_change,
)
from graphkiln_backend.server.version_control import VersionController
from graphkiln_backend.triton.instance_status import StatusFile
from graphkiln_backend.triton.rollout_files import (
    InstanceTally,
    assignment_path,
    read_assignment,
    write_file,
)

BACKENDS = frozenset({BACKEND, DROP_IN_BACKEND})
SHAPE = ("batch", 3)


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_TOLD_S", 0.0)


class Setup:
    """A server of the model `m`, and the rollouts of its store; `restart` begins another run."""

    def __init__(self, folder: Path, mode: str = "none", config: str = "") -> None:
        self.root, self.store, self.mode = folder, folder / "store", mode
        self.folder = RolloutFolder(folder / "state", self.store)
        self.native = False
        self.http: ListenAddress | None = ListenAddress(protocol="HTTP", host="0.0.0.0", port=8000)
        self.refused = ""
        self.admitted: list[int] = []
        self.instances = folder / "instances"
        self.instances.mkdir()
        self.runs = 0
        zoo.add(self.store, "m", zoo.scale(SHAPE), config)

    def restart(self, *, new: bool = True) -> Setup:
        """Begin a run: of the supervisor if `new`, else of tritonserver only."""
        self.runs += 1
        self.mirror = Mirror(self.root / f"run-{self.runs}")
        if new:
            for each in self.stores.rollouts.folders if self.runs > 1 else ():
                if each._claim is not None:
                    os.close(each._claim)  # as with the end of its process
            self.stores = ManagedStores([self.store], seat=self._seat)
            self.stores.rollouts = Rollouts.of(self.root / "state", [self.store], {})
        self.stores.rollouts.look()
        for path in self.instances.iterdir():
            path.unlink()
        self.stores.open(self.mirror, BACKENDS, lambda version: version)
        self.triton = FakeTriton(self.mirror.path)
        self.triton.start()
        self.versions = VersionController(
            mode=ControlMode(name=self.mode, poll_s=60.0, managed=self.mode != "explicit", completes=True),
            stores=self.stores,
            mirror=self.mirror,
            control=self.triton,
            instances=self.instances,
            admit=self._admit,
            load_timeout_s=5.0,
        )
        self.loop = RolloutController(
            stores=self.stores,
            mirror=self.mirror,
            control=self.triton,
            instances=self.instances,
            admit=self._admit,
            refresh=self.versions.refresh,
            managed=self.mode != "explicit",
            load_timeout_s=5.0,
            http=self.http,
            most_bytes=1000,
        )
        return self

    def _seat(self, config: ModelConfigProto, _: object) -> ModelConfigProto | None:
        return config if self.native and not self.stores.rollouts.is_running(config.name) else None

    def _admit(self, _: ShownModel, version: int, __: Callable[[], bool]) -> Verdict:
        self.admitted.append(version)
        return Verdict(self.refused)

    def add(self, version: int, proto: onnx.ModelProto | None = None) -> None:
        zoo.add(self.store, "m", proto or zoo.scale(SHAPE, 3), version=version)

    def ask(self, *, candidate: int = 2, serving: int = 1, share: float = 0.5, gates: Gates | None = None) -> None:
        before = self.folder.read_wanted("m")
        change = first_change(
            "m", candidate=candidate, serving=serving, share=share, gates=gates or Gates(), before=before
        )
        self.folder.write_wanted(change)

    def change(self, phase: Phase, share: float = 0.0) -> None:
        self.folder.write_wanted(self.wanted.changed(phase, share))

    @property
    def wanted(self) -> Wanted:
        wanted = self.folder.read_wanted("m")
        assert wanted
        return wanted

    @property
    def progress(self) -> Progress:
        progress = self.folder.read_progress("m")
        assert progress
        return progress

    def steps(self, count: int = 4) -> None:
        for _ in range(count):
            self.loop.step()

    def count(self, instance: str = "m_0", model: str = "m", **counts: object) -> None:
        tally = InstanceTally(model=model, serial=self.wanted.serial, **counts)  # type: ignore[arg-type]
        write_file(self.instances / f"{instance}.1.tally", tally)

    def serving(self) -> tuple[list[int], list[int]]:
        return self.triton.serving("m"), self.triton.serving("m.candidate")


@pytest.fixture
def setup(tmp_path: Path) -> Iterator[Setup]:
    return Setup(tmp_path).restart()


def test_the_candidate_is_a_model_of_its_own(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    assert setup.serving() == ([1], [2])
    assert setup.admitted == [2]
    config = read_config(setup.mirror.path / "m.candidate" / "config.pbtxt")
    assert (config.name, [group.count for group in config.instance_group]) == ("m.candidate", [1])
    assert IDLE_CORES in config.parameters
    told = read_assignment(setup.instances, "m")
    assert told is not None
    assert (told.serial, told.compared, told.answered) == (1, 0.5, 0.0)
    assert (told.host, told.port, told.headers, told.most_bytes) == ("127.0.0.1", 8000, {"key": "secret"}, 1000)
    assert assignment_path(setup.instances, "m").stat().st_mode & 0o77 == 0  # it holds the admin key
    assert (setup.progress.phase, setup.progress.share, setup.progress.applied_serial) == ("shadow", 0.5, 1)


def test_traffic_then_promoted(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.change("traffic", 0.25)
    setup.steps(1)
    told = read_assignment(setup.instances, "m")
    assert told is not None
    assert (told.serial, told.compared, told.answered) == (2, 0.05, 0.25)
    assert IDLE_CORES not in read_config(setup.mirror.path / "m.candidate" / "config.pbtxt").parameters
    assert setup.triton.loads.count("m.candidate") == 2  # in new processes
    setup.change("promoted")
    setup.steps(1)
    assert setup.serving() == ([2], [])
    assert not assignment_path(setup.instances, "m").exists()
    assert not (setup.mirror.path / "m.candidate").exists()
    assert (setup.progress.phase, setup.progress.applied_serial) == ("promoted", 3)
    assert setup.triton.ready


def test_an_aborted_version_stays_out_until_its_files_change(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.change("aborted")
    setup.steps(1)
    assert setup.serving() == ([1], [])
    for new in (False, True):
        setup.restart(new=new).steps(2)
        assert setup.serving() == ([1], [])
        assert "aborted" in setup.stores.refusals()["m", "2"]
    (setup.store / "m" / "2" / "model.onnx").write_bytes(zoo.scale(SHAPE, 4).SerializeToString() + b"")
    setup.restart()
    assert setup.serving() == ([2], [])


@pytest.mark.parametrize("mode", ["none", "poll"])
@pytest.mark.parametrize("new", [True, False])
def test_later_rollouts_keep_an_aborted_version_out(tmp_path: Path, mode: str, new: bool) -> None:
    setup = Setup(tmp_path, mode).restart()
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.change("aborted")
    setup.steps(1)
    setup.add(3)
    setup.ask(candidate=3)
    setup.steps()
    setup.versions.step()
    assert setup.serving() == ([1], [3])
    setup.restart(new=new).steps()
    assert setup.serving() == ([1], [3])
    setup.change("aborted")
    setup.steps(1)
    assert setup.restart(new=new).serving() == ([1], [])
    setup.ask(candidate=2)
    setup.steps(3)
    setup.change("promoted")
    setup.steps(1)
    assert setup.restart(new=new).serving() == ([2], [])


def test_other_files_than_those_that_were_tried_are_not_promoted(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "poll").restart()
    setup.add(2)
    setup.ask()
    setup.steps()
    (setup.store / "m" / "2" / "model.onnx").write_bytes(zoo.scale(SHAPE, 44).SerializeToString())
    setup.change("promoted")
    setup.steps(1)
    assert "files changed" in setup.wanted.reason
    for _ in range(3):
        setup.versions.step()
        setup.steps(1)
    assert setup.serving() == ([1], [])
    setup.restart()
    assert setup.serving() == ([1], [])


def test_another_rollout_may_name_an_aborted_version(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.change("aborted")
    setup.steps(1)
    setup.ask()
    setup.steps(3)
    assert setup.serving() == ([1], [2])
    setup.change("promoted")
    setup.steps(1)
    assert setup.serving() == ([2], [])


def test_an_older_version_can_be_promoted(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.add(2)
    setup.restart()
    assert setup.serving() == ([2], [])
    setup.ask(candidate=1, serving=2)
    setup.steps()
    assert setup.serving() == ([2], [1])
    setup.change("promoted")
    setup.steps(1)
    assert setup.serving() == ([1], [])
    assert setup.restart().serving() == ([1], [])


@pytest.mark.parametrize("second", ["aborted", "promoted"])
def test_a_rollback_skips_what_came_between(setup: Setup, second: Phase) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.change(second)
    setup.steps(1)
    setup.add(3)
    setup.ask(candidate=3, serving=setup.serving()[0][0])
    setup.steps()
    setup.change("promoted")
    setup.steps(1)
    assert setup.serving() == ([3], [])
    setup.ask(candidate=1, serving=3)
    setup.steps()
    assert setup.serving() == ([3], [1])
    setup.change("promoted")
    setup.steps(1)
    assert setup.serving() == ([1], [])
    assert setup.restart().serving() == ([1], [])
    setup.add(4)
    setup.ask(candidate=4, serving=1)  # a later rollout does not bring back what was rolled back
    setup.steps()
    assert setup.serving() == ([1], [4])
    setup.change("aborted")
    setup.steps(1)
    assert setup.restart().serving() == ([1], [])


def test_a_version_that_serves_already_becomes_the_candidate(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.add(2)
    setup.restart()
    setup.ask()
    setup.steps()
    assert setup.serving() == ([1], [2])


def test_poll_mode_leaves_the_candidate_out(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "poll").restart()
    setup.ask()
    setup.steps(2)
    assert "waiting for version 2" in setup.progress.reason
    setup.add(2)
    for _ in range(3):
        setup.versions.step()
        setup.steps(1)
    assert setup.serving() == ([1], [2])


@pytest.mark.parametrize("phase", ["shadow", "traffic", "promoted", "aborted"])
@pytest.mark.parametrize("new", [True, False])
@pytest.mark.parametrize("applied", [True, False])
def test_a_restart_converges(tmp_path: Path, phase: Phase, new: bool, applied: bool) -> None:
    setup = Setup(tmp_path).restart()
    setup.add(2)
    setup.ask()
    if applied:
        setup.steps()
    if phase != "shadow":
        setup.change(phase, 0.5 if phase == "traffic" else 0.0)
        if applied:
            setup.steps(1)
    setup.restart(new=new).steps()
    expected = {"shadow": ([1], [2]), "traffic": ([1], [2]), "promoted": ([2], []), "aborted": ([1], [])}
    assert setup.serving() == expected[phase]
    assert (setup.progress.phase, setup.progress.applied_serial) == (phase, setup.wanted.serial)
    assert assignment_path(setup.instances, "m").exists() == (phase in {"shadow", "traffic"})
    assert setup.triton.ready


def test_counts_of_instances_and_earlier_runs_are_added(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.count("m_0", compared=3, agreed=3)
    setup.count("m_1", compared=2, agreed=1, disagreed=1)
    setup.steps(1)
    assert (setup.progress.compared, setup.progress.disagreed) == (5, 1)
    setup.restart().steps()
    assert setup.progress.compared == 5
    setup.count("m_0", compared=1, agreed=1)
    setup.steps(1)
    assert setup.progress.compared == 6
    setup.change("traffic", 0.1)
    setup.steps(1)
    assert setup.progress.compared == 0


def test_gates_lead_to_traffic_and_promotion(setup: Setup) -> None:
    setup.add(2)
    setup.ask(gates=Gates(agree=0.9, requests=200, then=(0.1, 1.0)))
    setup.steps()
    setup.count(compared=200, agreed=200)
    setup.steps(2)
    assert (setup.wanted.phase, setup.wanted.share, setup.progress.phase) == ("traffic", 0.1, "traffic")
    for share in (0.1, 1.0):
        assert setup.wanted.share == share
        setup.count(answered=200)
        setup.steps(2)
    assert (setup.wanted.phase, setup.progress.phase) == ("promoted", "promoted")
    assert setup.serving() == ([2], [])


def test_a_gate_that_fails_aborts(setup: Setup) -> None:
    setup.add(2)
    setup.ask(gates=Gates(agree=0.9, requests=200, then=(1.0,)))
    setup.steps()
    setup.count(compared=100, agreed=50, disagreed=50)
    setup.steps(2)
    assert (setup.wanted.phase, setup.progress.phase) == ("aborted", "aborted")
    assert setup.wanted.reason == setup.progress.reason != ""
    assert setup.serving() == ([1], [])


def test_a_candidate_that_waits_for_a_core_is_not_silent(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.StarvationDetector, "starved_at", lambda *_: time.monotonic() - 10)
    setup.add(2)
    setup.ask()
    setup.steps()
    status = instance_status(pid=os.getpid(), model="m.candidate")
    with StatusFile(setup.instances, "m.candidate_0", status):
        setup.count(waiting_s=0.5)  # a fresh copy: what this process has computed so far does not count
        setup.steps(1)
        setup.count(waiting_s=1000.0)
        setup.steps(1)
        assert setup.wanted.phase == "shadow"
        monkeypatch.setattr(module.StarvationDetector, "starved_at", lambda *_: time.monotonic() - 31)
        setup.count(waiting_s=1001.0)
        setup.steps(1)
    assert "1001 s" in setup.wanted.reason


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kinds of files that cannot be written because the disk of the state is full."""
    kinds: list[str] = []
    write = rollouts.replace_file

    def fail(path: Path, text: str, **options: bool) -> None:
        if any(kind in path.name for kind in kinds):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, text, **options)

    monkeypatch.setattr(rollouts, "replace_file", fail)
    return kinds


def test_a_full_disk_does_not_stop_a_rollout(setup: Setup, full: list[str], caplog: pytest.LogCaptureFixture) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    full.append("progress")
    for compared in (100, 200, 300):
        setup.count(compared=compared, agreed=compared)
        setup.steps(1)
    assert caplog.text.count("No space left") == 1
    assert setup.serving() == ([1], [2])
    full.clear()
    setup.count(compared=400, agreed=400)
    setup.steps(1)
    assert setup.progress.compared == 400


def test_a_full_disk_while_the_candidate_is_proven(setup: Setup, full: list[str]) -> None:
    full.append("progress")
    setup.add(2)
    setup.ask()
    with pytest.raises(OSError, match="No space left"):  # logged and tried again
        setup.steps()
    assert setup.serving() == ([1], [2])
    assert read_assignment(setup.instances, "m") is not None
    full.clear()
    setup.steps(1)
    assert (setup.wanted.phase, setup.progress.phase) == ("shadow", "shadow")


def test_a_candidate_that_fails_while_the_disk_is_full_is_taken_back(setup: Setup, full: list[str]) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    full += ["progress", "wanted"]
    setup.count(failed=10, failed_in_a_row=5, failure="no memory")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            setup.steps(1)
        assert setup.serving() == ([1], [])
        assert not assignment_path(setup.instances, "m").exists()
    assert setup.wanted.phase == "shadow"
    full.clear()
    setup.steps(1)
    assert (setup.wanted.phase, setup.progress.phase) == ("aborted", "aborted")
    assert "no memory" in setup.wanted.reason


def test_a_state_folder_that_cannot_be_written_is_reported(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup.add(2)
    setup.ask()
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> int:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))

        patch.setattr(rollouts.os, "open", refuse)
        setup.steps()
    assert caplog.text.count("cannot be written: Read-only file system") == 1
    assert setup.serving() == ([1], [])
    setup.steps()
    assert setup.serving() == ([1], [2])


@pytest.mark.parametrize(("ran_s", "phase"), [(5.5, "aborted"), (4.5, "shadow")])
def test_a_copy_that_computes_without_end_is_silence(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, ran_s: float, phase: Phase
) -> None:
    monkeypatch.setattr(module.StarvationDetector, "starved_at", lambda *_: time.monotonic())
    used = [100.0]
    monkeypatch.setattr(module, "core_use", lambda _: (used[-1], 0.0))
    setup.add(2)
    setup.ask()
    setup.steps()
    with StatusFile(setup.instances, "m.candidate_0", instance_status(pid=os.getpid(), model="m.candidate")):
        for waiting_s, after_s in [(1.0, 0.0), (60.0, 4.0), (0.5, 4.0), (3.0, 4.0 + ran_s)]:
            used.append(100.0 + after_s)
            setup.count(waiting_s=waiting_s)
            setup.steps(1)
    assert setup.wanted.phase == phase


def test_shadow_says_nothing_about_the_deadline_of_users(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    slow = Latencies()
    slow.add(5.0)
    setup.count(compared=1, agreed=1, candidate_latency=slow)
    setup.steps(1)
    setup.change("traffic", 0.25)
    setup.steps(1)
    told = read_assignment(setup.instances, "m")
    assert told is not None
    assert told.deadline_s == 2.0
    setup.count(answered=1, candidate_latency=slow)
    setup.steps(1)
    setup.change("traffic", 0.5)
    setup.steps(1)
    told = read_assignment(setup.instances, "m")
    assert told is not None
    assert told.deadline_s > 40


@pytest.mark.parametrize(
    "counts",
    [
        {"compared": 1000, "agreed": 1000, "failed": 5, "failed_in_a_row": 5, "failure": "no memory"},
        {"compared": 9, "agreed": 9, "failed": 10, "failure": "no memory"},
        {"waiting_s": 31.0},
    ],
)
def test_failures_abort_without_gates(setup: Setup, counts: dict[str, object]) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.count(**counts)
    setup.steps(1)
    assert (setup.wanted.phase, setup.serving()) == ("aborted", ([1], []))
    assert "no memory" in setup.wanted.reason or "31 s" in setup.wanted.reason


def test_a_few_failures_do_not(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.count(compared=1000, agreed=1000, failed=20, failed_in_a_row=1)
    setup.steps(1)
    assert setup.wanted.phase == "shadow"


def test_a_dead_instance_of_the_candidate_aborts(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    with StatusFile(setup.instances, "m.candidate_0", instance_status(pid=1 << 30, model="m.candidate")):
        setup.loop.report_fault("m.candidate", "it died", f"m.candidate_0.{1 << 30}")
        assert not [*setup.instances.glob("m.candidate*.json")]
        setup.steps(1)
    assert (setup.wanted.phase, setup.wanted.reason) == ("aborted", "the candidate failed: it died")


def test_a_change_by_the_user_wins(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    setup.count(failed=5, failed_in_a_row=5)
    setup.loop._rollouts.look()  # the user is a moment sooner
    setup.change("promoted")
    setup.loop._follow(setup.loop._trials["m"])
    assert setup.wanted.phase == "promoted"
    setup.steps(2)
    assert setup.serving() == ([2], [])


def test_a_native_seat_becomes_pythons_meanwhile(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.native = True
    setup.restart()
    assert setup.stores.shown["m"].native is not None
    setup.add(2)
    setup.ask()
    setup.steps()
    assert setup.stores.shown["m"].native is None
    assert setup.serving() == ([1], [2])
    setup.change("aborted")
    setup.steps(1)
    assert setup.stores.shown["m"].native is not None


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("sequence_batching { }", "sequences"),
        ("version_policy { specific { versions: 1 } }", "version_policy"),
        ("model_transaction_policy { decoupled: true }", "decoupled"),
        ('backend: "tensorflow"', "tensorflow"),
    ],
)
def test_what_cannot_be_tried_is_refused(tmp_path: Path, config: str, reason: str) -> None:
    setup = Setup(tmp_path, config=config).restart()
    setup.add(2)
    setup.ask()
    setup.steps()
    assert reason in setup.progress.reason
    assert (setup.wanted.phase, setup.serving()) == ("aborted", ([1], []))


def test_other_refusals(tmp_path: Path) -> None:
    setup = Setup(tmp_path).restart()
    setup.add(2, zoo.scale(("batch", 4)))
    setup.ask()
    setup.steps()
    assert "signature" in setup.progress.reason
    shutil.rmtree(setup.store / "m" / "2")
    setup.add(2)
    setup.ask(serving=7)
    setup.steps()
    assert "version 7 does not serve" in setup.progress.reason
    setup.refused = "its outputs are wrong"
    setup.ask()
    setup.steps()
    assert "its outputs are wrong" in setup.progress.reason
    assert setup.serving() == ([1], [])


def test_without_http_a_candidate_cannot_be_asked(tmp_path: Path) -> None:
    setup = Setup(tmp_path)
    setup.http = None
    setup.restart()
    setup.add(2)
    setup.ask()
    setup.steps()
    assert "over HTTP" in setup.progress.reason
    assert setup.serving() == ([1], [])


def test_a_candidate_that_triton_cannot_load_is_refused(setup: Setup) -> None:
    proto = zoo.scale(SHAPE, 3)
    proto.doc_string = "bad"
    setup.add(2, proto)
    setup.ask()
    setup.steps()
    assert "cannot serve" in setup.progress.reason or "failed" in setup.progress.reason
    assert setup.serving() == ([1], [])
    assert setup.triton.ready


def test_a_server_that_ends_while_it_loads_a_candidate(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> str:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")

    monkeypatch.setattr(setup.triton, "load", load)
    setup.add(2)
    setup.ask()
    setup.steps()
    assert setup.progress.reason == "loading the candidate failed: [Errno 104] Connection reset by peer"
    assert setup.serving() == ([1], [])


def test_in_explicit_mode_it_is_refused(tmp_path: Path) -> None:
    setup = Setup(tmp_path, "explicit").restart()
    setup.add(2)
    setup.ask()
    setup.steps()
    assert "explicit" in setup.progress.reason


def test_a_rollout_whose_file_is_removed_is_taken_back(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    (setup.folder.path / "m.wanted.json").unlink()
    setup.steps(1)
    assert setup.triton.serving("m.candidate") == []


def test_a_damaged_file_changes_nothing(setup: Setup) -> None:
    setup.add(2)
    setup.ask()
    setup.steps()
    (setup.folder.path / "m.wanted.json").write_text("{")
    setup.steps(2)
    assert setup.serving() == ([1], [2])
