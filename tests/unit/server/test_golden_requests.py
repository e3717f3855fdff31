"""Golden samples over HTTP: tensors of all kinds, errors of the server, retries, and the process that asks."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import stand_in
from fake_kserve import Arrays, FakeKserve
from waiting import wait_until

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.golden import GoldenSamples
from graphkiln_backend.server import golden_requests as module
from graphkiln_backend.server.flags import ListenAddress, free_port
from graphkiln_backend.server.golden_requests import Answers, Asking, ServedSession, Target, Way

CONFIG = {
    "name": "m",
    "max_batch_size": 8,
    "input": [{"name": "x", "data_type": "TYPE_FP32", "dims": [3]}],
    "output": [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}],
    "instance_group": [{"kind": "KIND_CPU", "count": 1}],
}


def double(inputs: Arrays) -> Arrays:
    return {"y": inputs["x"] * 2}


@contextmanager
def serving(compute: Callable[[Arrays], Arrays] = double, **config: object) -> Iterator[FakeKserve]:
    with FakeKserve(compute, {**CONFIG, **config}) as server:
        yield server


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RETRY_S", 0.0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


def target_of(folder: Path) -> Target:
    return Target(
        model=folder.parent.name,
        version=int(folder.name),
        folder=str(folder),
        config=str(folder.parent / "config.pbtxt"),
    )


def way_to(server: FakeKserve, **options: object) -> Way:
    return Way(address=server.address, headers={"key": "secret"}, **options)  # type: ignore[arg-type]


def run(server: FakeKserve, folder: Path, feeds: Arrays, outputs: Sequence[str] | None = None) -> Arrays:
    """Send one request."""
    with ServedSession(target_of(folder), way_to(server)) as session:
        return session.run(feeds, outputs)


def ask(server: FakeKserve, *folders: Path, **options: object) -> list[Answers]:
    """Ask versions in this process."""
    found: list[Answers] = []
    module._ask(module._Task(targets=tuple(map(target_of, folders)), way=way_to(server, **options)), found.append)
    return found


VALUES: dict[str, np.ndarray] = {
    "BOOL": np.array([[True, False, True]]),
    **{f"UINT{bits}": np.array([[0, 1, 2**bits - 1]], f"uint{bits}") for bits in (8, 16, 32, 64)},
    **{f"INT{bits}": np.array([[-(2 ** (bits - 1)), 0, 7]], f"int{bits}") for bits in (8, 16, 32, 64)},
    "FP16": np.array([[0.5, -2, np.inf]], np.float16),
    "BF16": np.array([[0.5, -2, 3e38]], ml_dtypes.bfloat16),
    "FP32": np.array([[1e-45, np.nan, -1]], np.float32),
    "FP64": np.array([[1e300, 0, -1]], np.float64),
    "BYTES": np.array([[b"", b"a\0", "gr\N{LATIN SMALL LETTER U WITH DIAERESIS}n".encode()]], object),
}


class TestTensors:
    """Beside tritonclient, which decodes what is sent and encodes what is answered."""

    @pytest.mark.parametrize("dtype", [dtype.value for dtype in DType])
    def test_every_data_type_arrives_and_comes_back(self, store: Path, dtype: str) -> None:
        x = VALUES[dtype]
        golden = stand_in.golden_of({"x": x}, {"y": x})
        folder = stand_in.add(store, "m", golden=golden)
        with serving(lambda inputs: {"y": inputs["x"]}) as server:
            y = run(server, folder, {"x": x})["y"]
        ((_, sent),) = server.asked
        for found in (sent["x"], y):
            assert found.dtype == x.dtype
            assert found.shape == x.shape
            assert found.tolist() == x.tolist() or found.tobytes() == x.tobytes()

    def test_text_of_any_kind_is_sent_in_utf8(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        for texts in (
            np.array(["a", "\u00fc"]),
            np.array([b"a", "\u00fc".encode()]),
            np.array(["a", b"\xc3\xbc"], object),
        ):
            with serving(lambda inputs: {"y": inputs["x"]}) as server:
                y = run(server, folder, {"x": texts[None]})["y"]
            assert y.tolist() == [[b"a", "\u00fc".encode()]]

    def test_several_tensors_keep_their_names(self, store: Path) -> None:
        inputs = {"a": np.ones((2, 3), np.float32), "b": np.arange(4, dtype=np.int64).reshape(2, 2)}
        golden = stand_in.golden_of(inputs, {"p": inputs["b"], "q": inputs["a"]})
        folder = stand_in.add(store, "m", golden=golden)
        with serving(lambda given: {"q": given["a"], "p": given["b"]}, input=[], output=[]) as server:
            found = run(server, folder, inputs)
            assert run(server, folder, inputs, ["q"]).keys() == {"q"}
        assert found["p"].tolist() == inputs["b"].tolist()
        assert found["q"].tolist() == inputs["a"].tolist()

    def test_a_scalar_is_a_vector_of_one_element_outside(self, store: Path) -> None:
        x = np.array(3.0, np.float32)
        golden = stand_in.golden_of({"x": x}, {"y": x * 2}, whole=True)
        folder = stand_in.add(store, "m", proven=False)
        stand_in.adopt(folder, golden, stand_in.signature_of(golden, batched=False))
        tensor = {"data_type": "TYPE_FP32", "dims": [1]}
        with serving(max_batch_size=0, input=[{"name": "x", **tensor}], output=[{"name": "y", **tensor}]) as server:
            y = run(server, folder, {"x": x})["y"]
        assert server.asked[0][1]["x"].shape == (1,)
        assert (y.shape, y.tolist()) == ((), 6.0)

    @pytest.mark.parametrize("batched", [True, False])
    def test_reshape_gives_clients_another_shape(self, store: Path, batched: bool) -> None:
        x = np.arange(6, dtype=np.float32).reshape(1, 2, 3)
        folder = stand_in.add(store, "m", golden=stand_in.golden_of({"x": x}, {"y": x * 2}))
        shape = [] if batched else [1]
        outside = {"data_type": "TYPE_FP32", "dims": [*shape, 6], "reshape": {"shape": [*shape, 2, 3]}}
        with serving(
            max_batch_size=8 * batched, input=[{"name": "x", **outside}], output=[{"name": "y", **outside}]
        ) as server:
            y = run(server, folder, {"x": x})["y"]
        assert server.asked[0][1]["x"].shape == (1, 6)
        assert y.tolist() == (x * 2).tolist()

    def test_more_rows_than_a_batch_are_several_requests(self, store: Path) -> None:
        folder = stand_in.add(store, "m", golden=stand_in.doubled(20))
        with serving() as server:
            (answers,) = ask(server, folder)
        assert answers.reason == ""
        assert [len(inputs["x"]) for _, inputs in server.asked] == [1] * 20 + [8, 8, 4]

    def test_requests_have_the_headers_of_restricted_endpoints(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving() as server:
            ask(server, folder)
        assert server.headers["key"] == "secret"


class TestConfiguration:
    def test_it_is_that_of_the_server(self, store: Path) -> None:
        """Triton completes the file: the largest batch, the instances."""
        folder = stand_in.add(store, "m", config='backend: "python"')
        with serving(instance_group=[{"kind": "KIND_CPU", "count": 3}]) as server:
            (answers,) = ask(server, folder)
        assert answers.reason == ""
        assert sorted(len(inputs["x"]) for _, inputs in server.asked) == [1] * 4 * 3 + [8] * 3

    def test_where_it_is_restricted_the_file_counts(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with FakeKserve(double) as server:
            (answers,) = ask(server, folder)
        assert answers.reason == ""
        assert sorted(len(inputs["x"]) for _, inputs in server.asked) == [1, 1, 1, 1, 8]


class TestJudgment:
    @pytest.mark.parametrize(
        ("compute", "words"),
        [
            (lambda inputs: {"y": inputs["x"] * 2.01}, "the outputs changed"),
            (lambda inputs: {"y": inputs["x"] * np.nan}, "NaN"),
            (lambda inputs: {"y": inputs["x"][:, :2] * 2}, r"is float32\[4, 2\], not float32\[4, 3\]"),
            (lambda inputs: {"y": inputs["x"].astype(np.float64) * 2}, "is float64"),
            (lambda inputs: {"y": inputs["x"] * (2 if len(inputs["x"]) == 1 else 3)}, "batch sizes 1, 8"),
            (lambda inputs: {"other": inputs["x"]}, "y"),
        ],
    )
    def test_wrong_answers_are_final(self, store: Path, compute: Callable[[Arrays], Arrays], words: str) -> None:
        folder = stand_in.add(store, "m")
        with serving(compute) as server:
            (answers,) = ask(server, folder)
        assert (answers.model, answers.version, answers.answered) == ("m", 1, True)
        assert re.search(words, answers.reason)
        assert len(server.asked) <= 5, "it was asked again"

    def test_right_answers_have_their_numbers(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving(lambda inputs: {"y": inputs["x"] * np.float32(2.000002)}) as server:
            (answers,) = ask(server, folder)
        assert answers.reason == ""
        assert 5e-7 < answers.error < 2e-6
        assert "through the server" in answers.verdict

    @pytest.mark.parametrize("constant", [0.0, 5.0, np.nan])
    def test_samples_that_decide_nothing(self, store: Path, constant: float) -> None:
        """A model that ignores its inputs would pass."""
        x = stand_in.doubled().inputs["x"]
        folder = stand_in.add(store, "m", golden=stand_in.golden_of({"x": x}, {"y": np.full_like(x, constant)}))
        with serving(lambda inputs: {"y": np.full_like(inputs["x"], constant)}) as server:
            (answers,) = ask(server, folder)
        assert "prove nothing" in answers.reason

    def test_a_version_is_not_asked_if_its_files_are_damaged(self, store: Path) -> None:
        folders = [stand_in.add(store, name) for name in ("graph", "samples", "manifest", "good")]
        stand_in.write_model(folders[0], run="y = x * 2  # changed")
        (folders[1] / "golden.npz").write_bytes(b"PK\3\4 cut short")
        (folders[2] / "manifest.json").write_text("{")
        with serving() as server:
            graph, samples, manifest, good = ask(server, *folders)
            assert good.reason == ""
            assert {name for name, _ in server.asked} == {"good"}
            assert "model.py does not match" in graph.reason
            assert "golden.npz" in samples.reason
            assert "manifest.json" in manifest.reason
            for answers in ask(server, *folders[1:3], thorough=False):  # hashes are not compared
                assert answers.reason

    def test_an_unforeseen_error_of_one_version_affects_no_other(
        self, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folders = [stand_in.add(store, name) for name in ("bad", "good")]
        read = GoldenSamples.read

        def fail(path: Path) -> GoldenSamples:
            if path.parent.parent.name == "bad":
                raise ZeroDivisionError("by a sample")
            return read(path)

        monkeypatch.setattr(GoldenSamples, "read", staticmethod(fail))
        with serving() as server:
            bad, good = ask(server, *folders)
        assert (bad.reason, good.reason) == ("ZeroDivisionError: by a sample", "")

    def test_samples_larger_than_memory_are_read_one_after_the_other(
        self, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folders = [stand_in.add(store, name) for name in ("first", "second")]
        monkeypatch.setattr(module, "_EARLY_BYTES", 1)
        with serving() as server:
            assert [answers.reason for answers in ask(server, *folders)] == ["", ""]


class TestErrors:
    def test_the_backends_error_is_the_reason_after_three_attempts(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        text = "[request id: graphkiln-golden-sample] ValueError: no\n\nAt:\n  /x/model.py(3): execute\n"
        with serving() as server:
            server.errors = [(500, text)] * 3
            (answers,) = ask(server, folder)
        assert answers.reason == "the server answers a golden sample with an error: ValueError: no"
        assert len(server.asked) == 3

    def test_an_error_that_passes_is_none(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving() as server:
            server.errors = [(500, "out of memory")] * 2
            (answers,) = ask(server, folder)
        assert answers.reason == ""

    def test_the_reason_of_a_failed_load_is_reported_at_once(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving() as server:
            server.errors = [(400, "unknown model")] * 3
            reason = "Internal: RuntimeError: cannot load\n\nAt:\n  /x/model.py(3): initialize\n"
            server.rows = [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": reason}]
            (answers,) = ask(server, folder)
        assert answers.reason == "RuntimeError: cannot load"
        assert len(server.asked) == 1

    @pytest.mark.parametrize(
        "rows", [[], [{"name": "m", "version": "1", "state": "UNAVAILABLE", "reason": "unloaded"}]]
    )
    def test_a_version_that_the_user_unloads_is_not_wrong(self, store: Path, rows: list[dict[str, str]]) -> None:
        folder = stand_in.add(store, "m")
        with serving() as server:
            server.errors = [(404, "unknown model")]
            server.rows = rows
            (answers,) = ask(server, folder, thorough=False)
        assert not answers.answered

    def test_a_model_with_a_full_queue_is_not_wrong(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving() as server:
            server.errors = [(503, "Exceeds maximum queue size")] * 3
            (answers,) = ask(server, folder, thorough=False)
        assert not answers.answered
        assert "maximum queue size" in answers.reason

    def test_a_server_that_hangs_says_nothing_about_the_version(
        self, store: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        folder = stand_in.add(store, "m")
        monkeypatch.setattr(module, "_REQUEST_S", 0.1)
        with serving() as server:
            server.delay_s = 1.0
            (answers,) = ask(server, folder)
        assert not answers.answered
        assert "timed out" in answers.reason

    def test_nobody_listens(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        way = Way(address=ListenAddress(protocol="HTTP", host="127.0.0.1", port=free_port()), headers={}, start_s=0.1)
        found: list[Answers] = []
        module._ask(module._Task(targets=(target_of(folder),), way=way), found.append)
        assert not found[0].answered
        assert "refused" in found[0].reason


class TestIdle:
    def test_samples_are_asked_one_by_one_while_nothing_else_is(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving() as server:
            (answers,) = ask(server, folder, thorough=False, idle_s=5.0)
        assert answers.reason == ""
        assert [len(inputs["x"]) for _, inputs in server.asked] == [1, 1, 1, 1]

    def test_a_busy_model_is_asked_after_all_in_the_end(self, store: Path) -> None:
        folder = stand_in.add(store, "m", golden=stand_in.doubled(2))
        with serving() as server:
            server.statistics = lambda: int(time.time() * 1e3)  # always just now
            begun = time.monotonic()
            (answers,) = ask(server, folder, thorough=False, idle_s=0.3)
        assert answers.reason == ""
        assert time.monotonic() - begun >= 0.6

    def test_a_model_that_becomes_idle_is_asked_then(self, store: Path) -> None:
        folder = stand_in.add(store, "m", golden=stand_in.doubled(1))
        last_ms = int(time.time() * 1e3) + 200
        with serving() as server:
            server.statistics = lambda: last_ms
            ask(server, folder, thorough=False, idle_s=30.0)
        assert time.time() * 1e3 - last_ms >= 200


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


class TestProcess:
    def test_answers_come_one_by_one_and_the_process_ends(self, store: Path) -> None:
        folders = [stand_in.add(store, name) for name in ("a", "b")]
        with serving() as server, Asking([*map(target_of, folders)], way_to(server)) as asking:
            wait_until(lambda: asking.wait(0.1))
            pid = asking._process.pid
        assert {which: answers.reason for which, answers in asking.answers.items()} == {("a", 1): "", ("b", 1): ""}
        assert not is_running(pid)

    def test_it_waits_for_a_server_that_starts(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving() as later:
            address = later.address
        with Asking([target_of(folder)], Way(address=address, headers={}, start_s=3600.0)) as asking:
            assert not asking.wait(0.5)
            assert asking.answers == {}
            pid = asking._process.pid
            assert is_running(pid)
        assert not is_running(pid)

    def test_its_death_is_noticed(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        with serving() as server, Asking([target_of(folder)], way_to(server)) as asking:
            os.kill(asking._process.pid, signal.SIGKILL)
            with pytest.raises(EOFError):
                wait_until(lambda: asking.wait(1.0))

    def test_a_process_that_dies_before_it_reads_its_task(self, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = stand_in.add(store, "m")
        monkeypatch.setattr("sys.executable", "/bin/true")
        targets = [target_of(folder)] * 5000  # more than a pipe holds
        with serving() as server, Asking(targets, way_to(server)) as asking, pytest.raises(EOFError):
            asking.wait(10.0)

    def test_many_targets_are_more_than_a_pipe_holds(self, store: Path) -> None:
        folder = stand_in.add(store, "m")
        others = [stand_in.add(store, f"{number}{'n' * 200}", proven=False) for number in range(200)]
        for other in others:
            (other / "manifest.json").write_text("{")
        with serving() as server, Asking([*map(target_of, others), target_of(folder)], way_to(server)) as asking:
            wait_until(lambda: asking.wait(0.1))
        assert len(asking.answers) == 201
        assert asking.answers["m", 1].reason == ""

    def test_one_whose_parent_has_ended_meanwhile_does_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "end_with_parent", lambda: None)
        monkeypatch.setattr("sys.argv", ["golden_requests", str(os.getpid())])
        monkeypatch.setattr("sys.stdin", None)  # reading it would fail
        module._main()

    def test_nobody_to_ask(self) -> None:
        way = Way(address=ListenAddress(protocol="HTTP", host="127.0.0.1", port=1), headers={})
        with Asking([], way) as asking:
            assert asking.wait(0.0)


def test_a_task_survives_its_way_through_json(store: Path) -> None:
    from graphkiln_backend.graph.decoding import decode, encode

    folder = stand_in.add(store, "m")
    address = ListenAddress(protocol="HTTP", host="::1", port=8000)
    task = module._Task(targets=(target_of(folder),), way=Way(address=address, headers={"a": "b"}, start_s=3))
    document: Mapping[str, object] = json.loads(json.dumps(encode(task)))
    assert decode(module._Task, document) == task
