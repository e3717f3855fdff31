"""Recording of requests by an instance: which, how, and under faults of the disk."""

from __future__ import annotations

import hashlib
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import duckdb
import numpy as np
import pytest
from fake_session import FakeSession, spec
from fake_triton import InferenceRequest
from recorded import FAULTS, Fault, numbered, origin, rows, settings, write_record
from waiting import wait_until

from graphkiln_backend.graph.signature import Signature
from graphkiln_backend.proof.decision import confidence_interval
from graphkiln_backend.triton import recording as module
from graphkiln_backend.triton.executor import Executor
from graphkiln_backend.triton.recording import Recorder, RecordingExecutor
from graphkiln_backend.triton.request_position import position_of

SUPPORT = Path(__file__).parents[2] / "support"


def recorder(folder: Path, **changes: object) -> Recorder:
    return Recorder(settings(folder, **changes), origin())


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


class TestChoice:
    def test_one_percent_of_a_million_ids(self) -> None:
        chosen = sum(position_of(f"request-{number}", {}) < 0.01 for number in range(1_000_000))
        low, high = 10_000 - 3.3 * 99.5, 10_000 + 3.3 * 99.5  # of the binomial distribution, at 99.9%
        assert low < chosen < high

    def test_retry_has_the_same_position(self) -> None:
        assert position_of("a", {}) == position_of("a", {"x": np.ones(3)}) != position_of("b", {})

    def test_positions_for_other_purposes_are_independent(self) -> None:
        """Otherwise all recorded requests would be answered by the version that gets a share of the traffic."""
        positions = [(position_of(str(n), {}), position_of(str(n), {}, b"traffic")) for n in range(2000)]
        assert abs(np.corrcoef(np.array(positions).T)[0, 1]) < 0.1

    @pytest.mark.parametrize("size", [3, 300, 600_000])
    def test_without_an_id_the_inputs_decide(self, size: int) -> None:
        generator = np.random.default_rng(0)
        first, second = (generator.random((1, size), np.float32) for _ in range(2))
        assert position_of("", {"x": first}) == position_of("", {"x": first.copy()})
        assert position_of("", {"x": first}) != position_of("", {"x": second})
        assert position_of("", {"x": first}) != position_of("", {"y": first})

    def test_text_inputs(self) -> None:
        one, other = (np.array([[word]], np.object_) for word in (b"one", b"other"))
        assert position_of("", {"x": one}) != position_of("", {"x": other})

    def test_share_without_ids(self) -> None:
        inputs = np.random.default_rng(1).random((5000, 1, 40))
        chosen = sum(position_of("", {"x": row}) < 0.1 for row in inputs)
        low, high = confidence_interval(chosen, len(inputs))
        assert low < 0.1 < high


class TestExecutor:
    @pytest.fixture
    def executor(self, tmp_path: Path) -> Iterator[RecordingExecutor]:
        signature = Signature(inputs=(spec("x", "batch", 2),), outputs=(spec("y", "batch", 2),))
        session = FakeSession(signature, lambda feeds: {"y": feeds["x"] * np.float32(2)})
        with recorder(tmp_path) as self.recorder:
            yield RecordingExecutor(Executor(session, batching=True, input_ranks={"x": 3}), self.recorder)

    def request(self, number: float, shape: tuple[int, ...] = (1, 1, 2), name: str = "r") -> InferenceRequest:
        return InferenceRequest({"x": np.full(shape, number, np.float32)}, request_id=name)

    def test_single_request_in_the_shapes_of_the_graph(self, executor: RecordingExecutor, tmp_path: Path) -> None:
        before = time.time_ns()
        executor.execute(self.request(1))
        self.recorder.close()
        (row,) = rows(tmp_path)
        assert row.inputs is not None
        assert (row.inputs["x"].tolist(), row.outputs["y"].tolist()) == ([[1, 1]], [[2, 2]])
        assert (row.request_id, row.model, row.version, row.engine) == ("r", "m", 1, "onnxruntime")
        assert before <= row.time_ns <= time.time_ns()
        assert 0 < row.latency_us < 1e6

    def test_requests_of_a_batch_are_rows(self, executor: RecordingExecutor, tmp_path: Path) -> None:
        executor.execute_batch([self.request(number, name=str(number)) for number in range(3)])
        self.recorder.close()
        assert {row.request_id: row.outputs["y"].tolist() for row in rows(tmp_path)} == {
            str(number): [[2 * number] * 2] for number in range(3)
        }

    def test_failed_request_is_no_row(self, executor: RecordingExecutor, tmp_path: Path) -> None:
        executor.execute_batch([self.request(1), self.request(1, (1, 1, 3))])
        executor.execute(self.request(1, (1, 1, 3)))
        self.recorder.close()
        assert len(rows(tmp_path)) == 1

    def test_share(self, executor: RecordingExecutor, tmp_path: Path) -> None:
        self.recorder.share = 0.5
        for number in range(100):
            executor.execute(self.request(number, name=str(number)))
            executor.execute(self.request(number, name=""))
        self.recorder.close()
        counted = Counter(bool(row.request_id) for row in rows(tmp_path))
        assert counted[True] == sum(position_of(str(number), {}, b"record") < 0.5 for number in range(100))
        assert 30 < counted[False] < 70

    def test_answer_does_not_depend_on_the_record(
        self, executor: RecordingExecutor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(_: object) -> None:
            raise MemoryError

        monkeypatch.setattr(module, "_copy", fail)
        result = executor.execute(self.request(1))
        assert isinstance(result, dict)
        assert result["y"].tolist() == [[2, 2]]
        assert self.recorder.dropped == 1
        assert self.recorder._waiting_bytes == 0
        assert "was not recorded: MemoryError" in caplog.text

    def test_copies_are_not_views(self, executor: RecordingExecutor, tmp_path: Path) -> None:
        """Triton frees the memory of a request, and sessions reuse their buffers."""
        request = self.request(1)
        executor.execute(request)
        request.inputs()[0].content[:] = 7
        self.recorder.close()
        assert rows(tmp_path)[0].inputs["x"].tolist() == [[1, 1]]  # type: ignore[index]


def test_digests(tmp_path: Path) -> None:
    write_record(tmp_path, numbered(2), inputs="digest")
    first, second = rows(tmp_path)
    assert first.inputs is None
    assert second.outputs["y"].tolist() == [[2, 2, 2]]
    (file,) = (tmp_path / "m").iterdir()
    tensor = module.pq.read_table(file)["inputs"][1].as_py()[0]
    assert tensor["data"] is None
    assert tensor["sha256"] == hashlib.sha256(np.ones((1, 3), np.float32).tobytes()).hexdigest()
    assert tensor["shape"] == [1, 3]


FIRST_ROW = """
import sys
from pathlib import Path
import numpy as np
from recorded import origin, settings
from graphkiln_backend.triton.recording import Recorder
with Recorder(settings(Path(sys.argv[1])), origin()) as recorder:
    before = {*sys.modules}
    recorder.record("r", {"x": np.zeros(3)}, {"y": np.array([b"text"], np.object_)}, 1e-3)
assert recorder.recorded == 1
print(*{*sys.modules} - before)
"""


def test_recording_imports_nothing(tmp_path: Path) -> None:
    """An import of 0.2 s at the first row group, as of pandas by Arrow, holds up requests."""
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    command = [sys.executable, "-c", FIRST_ROW, str(tmp_path)]
    assert subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout == "\n"


class TestFiles:
    def test_file_is_hidden_until_it_is_complete(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_TICK_S", 0.01)
        monkeypatch.setattr(module, "GROUP_BYTES", 1)
        with recorder(tmp_path) as writer:
            writer.record("r", {}, {"y": np.ones(2)}, 1e-3)
            wait_until(lambda: bool(names(tmp_path)))
            (name,) = names(tmp_path)
            assert name.startswith(".")
            assert name.endswith(".partial")
            assert writer.recorded == 0
        (finished,) = names(tmp_path)
        assert name == f".{finished}.partial"
        assert writer.recorded == 1

    def test_two_instances_write_into_one_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "GROUP_BYTES", 1)
        with recorder(tmp_path) as first, recorder(tmp_path) as second:
            for count, writer in enumerate((first, second), 1):
                writer.record("r", {}, {"y": np.ones(2)}, 1e-3)
                wait_until(lambda count=count: len(names(tmp_path)) == count)
        assert (first.recorded, second.recorded, first.dropped + second.dropped) == (1, 1, 0)

    def test_bounded_age(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_TICK_S", 0.01)
        monkeypatch.setattr(module, "FILE_S", 0.1)
        with recorder(tmp_path) as writer:
            for count in (1, 2):
                writer.record("r", {}, {"y": np.ones(2)}, 1e-3)
                wait_until(lambda count=count: writer.recorded == count)
                assert len(names(tmp_path)) == count

    def test_bounded_size(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "GROUP_BYTES", 4_000)
        monkeypatch.setattr(module, "FILE_BYTES", 10_000)
        write_record(tmp_path, [({"x": np.zeros(250, np.float32)}, {})] * 100)
        assert len(names(tmp_path)) == 12  # each with 3 groups of 3 rows
        assert len(rows(tmp_path)) == 100

    def test_only_the_user_can_read_them(self, tmp_path: Path) -> None:
        write_record(tmp_path, numbered(1))
        (file,) = (tmp_path / "m").iterdir()
        assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)

    def test_keep(self, tmp_path: Path) -> None:
        write_record(tmp_path, numbered(1))
        (old,) = (tmp_path / "m").iterdir()
        older = old.rename(old.with_name(old.name.replace("2026", "2016")))
        with recorder(tmp_path, keep_s=3600.0) as writer:
            writer.record("r", {}, {"y": np.ones(2)}, 1e-3)
        assert not older.exists()
        assert len(names(tmp_path)) == 1

    def test_requests_beyond_the_memory_are_dropped(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        writing = threading.Event()
        monkeypatch.setattr(module, "remove_leftovers", lambda _: writing.wait(20))  # a slow disk
        row = np.zeros(module.QUEUE_BYTES // 8, np.uint8)
        with recorder(tmp_path) as writer:
            for _ in range(20):
                writer.record("r", {"x": row}, {}, 1e-3)
            assert writer.dropped == 13
            writer.record("r", {"x": np.zeros(2 * module.QUEUE_BYTES, np.uint8)}, {}, 1e-3)
            writing.set()
            wait_until(lambda: writer._waiting_bytes < module.GROUP_BYTES)
            writer.record("r", {"x": row}, {}, 1e-3)
        assert (writer.recorded, writer.dropped, writer._waiting_bytes) == (8, 14, 0)

    def test_no_thread_outlives_the_instance(self, tmp_path: Path) -> None:
        before = set(threading.enumerate())
        with recorder(tmp_path):
            assert len(set(threading.enumerate()) - before) == 1
        assert set(threading.enumerate()) == before


@pytest.mark.parametrize(("kind", "reason"), FAULTS.items())
def test_fault_of_the_folder_is_logged_once_and_ends(
    kind: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_TICK_S", 0.01)
    monkeypatch.setattr(module, "RETRY_S", 0.1)
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    caplog.set_level(logging.INFO)
    folder = tmp_path / "record"
    folder.mkdir()
    fault = Fault(folder)
    noise = np.random.default_rng(0).random(1 << 16)  # 512 kB that do not compress
    with fault.stack, recorder(folder, share=1.0) as writer:
        getattr(fault, kind)()
        for _ in range(3):
            offered = writer.dropped
            while writer.dropped == offered:
                writer.record("lost", {"x": noise}, {}, 1e-3)
                time.sleep(0.02)
            wait_until(lambda: time.monotonic() > writer._paused_until)
        assert [message for message in caplog.messages if reason in message] == caplog.messages[:1] == caplog.messages
        assert "not recorded in" in caplog.text
        fault.stack.close()
        time.sleep(0.2)
        writer.record("kept", {"x": noise}, {}, 1e-3)
    assert "lost" not in {row.request_id for row in rows(folder)}
    assert [row.request_id for row in rows(folder)] == ["kept"]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert "recorded again" in caplog.messages[1]
    assert not [name for name in names(folder) if name.startswith(".")]


def test_folder_that_is_removed_with_an_unfinished_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "GROUP_BYTES", 1)
    folder = tmp_path / "record"
    folder.mkdir()
    with recorder(folder) as writer:
        writer.record("lost", {}, {"y": np.ones(2)}, 1e-3)
        wait_until(lambda: bool(names(folder)))
        shutil.rmtree(folder)
    assert (writer.recorded, writer.dropped) == (0, 1)
    (message,) = caplog.messages
    assert "No such file" in message


WRITER = """
import itertools, sys, time
import numpy as np
from pathlib import Path
from graphkiln_backend.triton import recording
from recorded import origin, settings
recording.FILE_S, recording._TICK_S, recording.GROUP_BYTES, recording.FILE_BYTES = 0.03, 0.003, 40_000, 200_000
with recording.Recorder(settings(Path(sys.argv[1])), origin()) as recorder:
    for number in itertools.count():
        array = np.full((1, 500), number, np.float32)
        recorder.record(f"{sys.argv[2]}-{number}", {"x": array}, {"y": 2 * array}, 1e-3)
        if number % 20 == 0:
            print(recorder.recorded, flush=True)
            time.sleep(0.002)
"""


@pytest.mark.slow
def test_kill_at_random_moments(tmp_path: Path) -> None:
    """Whole files or nothing: no row is torn, none is there twice, and remains are removed."""
    environment = {**os.environ, "PYTHONPATH": str(SUPPORT)}
    generator, kills, remains = random.Random(40), 50, 0
    with ExitStack() as stack:
        writers: list[tuple[int, subprocess.Popen[str]]] = []
        for number in range(kills):
            command = [sys.executable, "-c", WRITER, str(tmp_path), str(number)]
            process = stack.enter_context(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
            stack.callback(process.kill)
            writers.append((number, process))
            if len(writers) < 2:  # two at a time, so that one removes the remains of the other
                continue
            _, killed = writers.pop(0)
            assert killed.stdout is not None
            least = generator.randrange(500)
            while int(killed.stdout.readline()) < least:
                pass
            time.sleep(generator.uniform(0, 0.05))
            killed.send_signal(signal.SIGKILL)
            killed.communicate()
            remains += any(name.startswith(".") for name in names(tmp_path))
        writers[0][1].kill()
        writers[0][1].communicate()
    found = rows(tmp_path)
    assert len(found) > 5000
    assert max(Counter(row.request_id for row in found).values()) == 1
    for row in found:
        number = float(row.request_id.partition("-")[2])
        assert row.inputs is not None
        assert np.array_equal(row.inputs["x"], np.full((1, 500), number, np.float32))
        assert np.array_equal(row.outputs["y"], 2 * row.inputs["x"])
    for name in {row.request_id.partition("-")[0] for row in found}:
        numbers = [int(row.request_id.partition("-")[2]) for row in found if row.request_id.startswith(f"{name}-")]
        assert sorted(numbers) == list(range(len(numbers))), "only rows of the unfinished file are lost"
    assert remains > 10
    assert len(module.pq.read_table(tmp_path)) == len(found)
    query = "SELECT count(DISTINCT request_id) FROM read_parquet(?)"
    assert duckdb.execute(query, [f"{tmp_path}/*/*.parquet"]).fetchall() == [(len(found),)]
    write_record(tmp_path, numbered(1))
    assert not [name for name in names(tmp_path) if name.startswith(".")]
