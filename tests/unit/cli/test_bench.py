"""`graphkiln bench` with a fake load generator: loads, contents of requests, tables, reports and mistakes."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import FakeClient, FakeModel, RunVerb, table_rows
from commands import words as words_of
from PIL import Image

from graphkiln.bench import processes as load_processes
from graphkiln.bench.generator import Measurement
from graphkiln.bench.processes import Feeds, Load, Target
from graphkiln_backend.graph.errors import ConnectionFailed, ServerError

LATENCIES = {"p50": 1.5, "p90": 2.0, "p99": 3.25, "p99.9": 4.0, "mean": 1.6}


def measurement(**fields: Any) -> Measurement:
    usual = {
        "seconds": 2.0, "answered": 200, "due": 0, "unsent": 0, "errors": {}, "per_second": 100.0,
        "per_second_range": (98.0, 103.0), "latency_ms": LATENCIES, "client_cores": 0.25, "processes": 3,
    }  # fmt: skip
    return Measurement(**{**usual, **fields})


class Loads:
    """A fake load generator that records its calls."""

    def __init__(self) -> None:
        self.calls: list[Load] = []
        self.targets: list[Target] = []
        self.samples: list[list[Feeds]] = []
        self.results = [measurement()]

    def __call__(self, target: Target, samples: list[Feeds], load: Load, at_start: Callable[[], None]) -> Measurement:
        self.calls.append(load)
        self.targets.append(target)
        self.samples.append(samples)
        at_start()
        return self.results[min(len(self.calls), len(self.results)) - 1]


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Loads:
    fake = Loads()
    monkeypatch.setattr(load_processes, "measure_load", fake)
    return fake


@pytest.mark.usefixtures("client")
def test_options_reach_the_load(run: RunVerb, loads: Loads) -> None:
    connection = ("--url", "grpc://triton.test:8001", "--header", "A: b")
    words = ("--concurrency", "1,4,16", "--duration", "2", "--warmup", "0", "--shared-memory")
    assert run("bench", "--model", "m", "--version", "2", *connection, *words).code == 0
    assert loads.calls == [Load(callers=callers, seconds=2.0, warmup_s=0.0) for callers in (1, 4, 16)]
    target = loads.targets[0]
    assert (target.model, target.version, target.shared_memory) == ("m", "2", True)
    assert (target.client["url"], target.client["headers"]) == ("grpc://triton.test:8001", {"A": "b"})


@pytest.fixture
def arrivals(run: RunVerb, client: FakeClient, loads: Loads) -> Callable[..., tuple[Load, list[float]]]:
    """Run an open loop; return its load and due times."""

    def run_bench(*words: object) -> tuple[Load, list[float]]:
        assert run("bench", "--model", "m", *words).code == 0
        assert client.open == 0
        load = loads.calls[-1]
        assert load.arrivals is not None
        return load, load.arrivals.tolist()

    return run_bench


def test_rate_is_an_open_loop(arrivals: Any) -> None:
    load, even = arrivals("--rate", 4, "--arrivals", "constant", "--duration", 1, "--warmup", 0.5)
    assert (load.callers, even) == (256, [0, 0.25, 0.5, 0.75, 1, 1.25])
    _, random = arrivals("--rate", 100)
    assert len(random) == pytest.approx(100 * 11, rel=0.2)
    assert random == arrivals("--rate", 100, "--arrivals", "poisson")[1]
    _, together = arrivals("--rate", 100, "--burst", 5)
    assert {int(size) % 5 for size in np.unique(together, return_counts=True)[1]} == {0}


def test_trace_has_its_recorded_duration(arrivals: Any, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("10\n11\n12\n")
    load, due = arrivals("--trace", trace)
    assert load.seconds == pytest.approx(2, abs=0.01)
    assert due[-3:] == [1, 2, 3]
    assert load.seconds + load.warmup_s > due[-1]
    assert due[:-3] == pytest.approx([0, 0.667], abs=0.01)  # the warm-up, at the mean rate
    assert arrivals("--trace", trace, "--warmup", 0, "--duration", 1.5)[1] == [0, 1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        *((f"--concurrency {text}", "expected numbers from 1") for text in ("1,0", "1,,2", "1,4097")),
        ("--concurrency 2 --rate 5", "--concurrency and --rate are mutually exclusive"),
        ("--burst 5", "add --rate"),
        ("--rate 5 --burst 5 --arrivals constant", "--burst and --arrivals"),
        ("--rate inf", "inf requests per second for 11 s"),
        ("--rate 1e9 --duration 1", "requests per second for 2 s is out of range"),
        ("--duration 1e10", "a run of 1e+10 s"),
        ("--trace endless.csv", "1e+300 s is out of range"),
        ("--rate 0.01 --duration 1", "no request is due in"),
        ("--samples x.npz --input random", "--samples and --input"),
        ("--html none/page.html", "there is no folder"),
    ],
)
def test_mistakes(
    run: RunVerb, loads: Loads, client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *,
    words: str, message: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    Path("endless.csv").write_text("0\n1e300\n")
    finished = run("bench", "--model", "m", *words.split())
    assert (finished.code, message in " ".join(finished.err.split())) == (2, True), finished.err
    assert loads.calls == []
    assert client.connected == []


class TestTables:
    @pytest.mark.usefixtures("client", "loads")
    def test_tables_of_client_and_server(self, run: RunVerb) -> None:
        out = run("bench", "--model", "m").out
        client, server = table_rows(out)
        assert "sent by graphkiln in 3 processes, using up to" in words_of(out)
        assert client == ["1", "100.0 ± 3.0", "1.50", "2.00", "3.25", "4.00", "0.25"]
        assert server == ["1", "10", "20", "300", "40", "5.0", "-"]  # means of one request, and the batch
        assert "±: 95% interval of the rate" in words_of(out)

    @pytest.mark.usefixtures("client")
    def test_errors_and_unsent_requests(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(), measurement(errors={"Overloaded": 3, "ServerError": 1}, unsent=7)]
        finished = run("bench", "--model", "m", "--concurrency", "1,2")
        assert finished.code == 1
        rows = table_rows(finished.out)
        first, second = (next(row for row in rows if row[0] == load and len(row) == 9) for load in "12")
        assert first[-2:] == ["0", "0"]
        assert second[-1] == "7"
        errors = "".join(row[-2] for row in rows[rows.index(second) :] if len(row) == 9)
        assert errors.replace(" ", "") == "3Overloaded1ServerError"  # folded, not truncated

    @pytest.mark.usefixtures("client")
    def test_run_without_answers(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(latency_ms={}, per_second=0.0, per_second_range=(0.0, 0.0), answered=0)]
        (client, _) = table_rows(run("bench", "--model", "m").out)
        assert client[1:6] == ["0.0 ± 0.0", "-", "-", "-", "-"]

    @pytest.mark.usefixtures("client")
    @pytest.mark.parametrize(
        ("due", "answered", "is_noted"), [(200, 195, False), (200, 150, True), (9, 5, False), (0, 9, False)]
    )
    def test_missed_rate_is_noted(self, run: RunVerb, loads: Loads, due: int, answered: int, is_noted: bool) -> None:
        loads.results = [measurement(due=due, answered=answered)]
        out = words_of(run("bench", "--model", "m", "--rate", "100").out)

        assert (f"only {answered / 2:.1f} of {due / 2:.1f} requests per second" in out) is is_noted

    @pytest.mark.usefixtures("client")
    @pytest.mark.parametrize(("answered", "few"), [(1, "p50, p90, p99, p99.9"), (100, "p99.9"), (1000, ""), (0, "")])
    def test_percentiles_of_few_requests_are_noted(self, run: RunVerb, loads: Loads, answered: int, few: str) -> None:
        loads.results = [measurement(answered=answered)]
        out = words_of(run("bench", "--model", "m").out)

        assert (f"1: {few} of only {answered} answered requests" in out) is bool(few)
        assert ("the slowest request" in out) is bool(few)

    @pytest.mark.usefixtures("loads")
    @pytest.mark.parametrize("how", ["started again", "gone"])
    def test_server_that_ends_during_the_run(
        self, run: RunVerb, client: FakeClient, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, how: str
    ) -> None:
        first = FakeModel(counted=1000).statistics()
        readings: list[Any] = [first, FakeModel().statistics() if how == "started again" else ConnectionFailed("gone")]

        def read() -> dict[str, Any]:
            reading = readings.pop(0)
            if isinstance(reading, Exception):
                raise reading
            return reading

        monkeypatch.setattr(client.fake_model, "statistics", read)
        page = tmp_path / "bench.html"
        finished = run("bench", "--model", "m", "--html", page)
        measured, served = table_rows(finished.out)
        assert measured[2] == "1.50"
        assert served == ["1", "-", "-", "-", "-", "-", "-"]
        assert "the server was restarted or is gone" in words_of(finished.out)
        assert finished.code == 0
        assert page.stat().st_size

    @pytest.mark.usefixtures("client")
    def test_tables_fit_80_columns(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [
            measurement(
                per_second=123456.7,
                per_second_range=(100000.0, 140000.0),
                latency_ms=dict.fromkeys(LATENCIES, 12345.67),
                errors={"DeadlineExceeded": 123456},
                unsent=12345,
            )
        ]
        out = run("bench", "--model", "m", "--rate", "123456.7", "--burst", "128").out
        assert max(map(len, out.splitlines())) <= 80

    @pytest.mark.usefixtures("client")
    def test_json(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(), measurement(errors={"ServerError": 1})]
        finished = run("bench", "--model", "m", "--concurrency", "1,2", "--json")
        first, second = json.loads(finished.out)
        assert finished.code == 1
        assert first["load"] == "1"
        assert first["client"]["latency_ms"] == LATENCIES
        assert first["generator"]["name"] == "graphkiln"
        assert (first["generator"]["processes"], first["generator"]["cores"]) == (3, 0.25)
        assert first["generator"]["share_of_machine"] == pytest.approx(0.25 / len(os.sched_getaffinity(0)))
        assert first["server_us"] == {"queue": 10.0, "input": 20.0, "infer": 300.0, "output": 40.0}
        assert first["batch"] == 5.0
        assert first["server_cores"] is None
        assert second["client"]["errors"] == {"ServerError": 1}


@pytest.mark.usefixtures("client", "loads")
def test_tables_need_no_report_library(run: RunVerb, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's installation has no jinja2."""
    monkeypatch.delitem(sys.modules, "graphkiln.reporting.report", raising=False)
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert run("bench", "--model", "m").code == 0


@pytest.mark.usefixtures("client")
def test_html_report(run: RunVerb, loads: Loads, tmp_path: Path) -> None:
    loads.results = [measurement(per_second=300.0), measurement(latency_ms={}, errors={"ServerError": 3})]
    run("bench", "--model", "m", "--concurrency", "1,4", "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert page.count("<svg") == page.count("<table") == 3
    for cell in ("300.0", "1.50", "3.25", "3 ServerError", "98.0", "103.0", "300", "5.0"):
        assert re.search(rf">{re.escape(cell)}</td>", page), cell
    assert "sent by" in page
    assert "To repeat it" in page


# Contents of requests: random numbers, given tensors or samples.

ROWS = np.arange(20, dtype=np.float32).reshape(5, 2, 2)


class TestContents:
    @pytest.fixture(autouse=True)
    def _here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

    @pytest.fixture
    def sent(self, run: RunVerb, client: FakeClient, loads: Loads) -> Any:
        """Run a load; return the contents of its requests, or the error."""

        def send(options: str) -> Any:
            finished = run("bench", "--model", "m", *options.split())
            assert finished.code in (0, 2), finished.err
            assert client.open == 0
            return words_of(finished.err) if finished.code else loads.samples[-1]

        return send

    def declare(self, client: FakeClient, *inputs: tuple[str, str, list[int]]) -> None:
        client.fake_model.inputs = [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in inputs]

    def test_rows_of_an_archive_are_requests(self, sent: Any, client: FakeClient) -> None:
        np.savez("s.npz", X=ROWS)
        found = [feeds["X"] for feeds in sent("--samples s.npz")]
        assert [array.shape for array in found] == [(1, 2, 2)] * 5
        np.testing.assert_array_equal(np.concatenate(found), ROWS)
        assert len(client.fake_model.fed) == 1  # the first one is checked before the load
        assert [feeds["X"].shape for feeds in sent("--samples s.npz --batch-size 2")] == [(2, 2, 2)] * 2

    def test_golden_samples(self, sent: Any, client: FakeClient) -> None:
        np.savez("golden.npz", **{"input/X": ROWS, "source/Y": ROWS, "graph/Y": ROWS})
        for path in (".", "golden.npz"):
            assert [feeds["X"].shape for feeds in sent(f"--samples {path}")] == [(1, 2, 2)] * 5
        self.declare(client, ("X", "FP32", [2, 2]))  # no batch dimension
        np.testing.assert_array_equal(np.stack([feeds["X"] for feeds in sent("--samples .")]), ROWS)

    def test_folder_of_images_and_archives(self, sent: Any, client: FakeClient) -> None:
        for name in (".DS_Store", "._b.png"):
            Path(name).write_bytes(b"no image")
        Image.new("L", (4, 4), 255).save("b.png")
        np.savez("a.npz", X=ROWS[:3])
        self.declare(client, ("X", "FP32", [-1, 3, 2, 2]))
        first, second = sent("--samples .")
        assert (first["X"].shape, second["X"].shape) == ((3, 2, 2), (1, 3, 2, 2))
        assert "--batch-size 2: each file of . is a request" in sent("--samples . --batch-size 2")

    @pytest.mark.parametrize(
        ("arrays", "size", "message"),
        [
            ({"X": ROWS, "Z": ROWS[:2]}, 1, "row for each sample, got X [5, 2, 2], Z [2, 2, 2]"),
            ({"X": ROWS}, 6, "5 samples are fewer than --batch-size 6"),
            ({"X": ROWS[:0]}, 1, "is empty"),
            ({"X": np.float32(1)}, 1, "is empty"),
            ({}, 1, "a row for each sample"),
        ],
    )
    def test_invalid_archives(self, sent: Any, arrays: dict[str, Any], size: int, message: str) -> None:
        np.savez("s.npz", **arrays)
        assert message in sent(f"--samples s.npz --batch-size {size}")

    def test_invalid_paths(self, sent: Any) -> None:
        Path("bad.npz").write_text("no archive")
        Path("empty").mkdir()
        Path("texts").mkdir()
        Path("texts/a.txt").write_text("no image")
        for name in ("bad.npz", "empty", "nowhere", "nowhere.npz", "texts"):
            assert isinstance(sent(f"--samples {name}"), str)

    def test_random_inputs_are_reproducible(self, sent: Any, client: FakeClient) -> None:
        self.declare(
            client, ("F", "FP16", [-1, 3]), ("I", "INT64", [-1]), ("B", "BOOL", [2, 2]), ("T", "BYTES", [-1, 1]),
            ("S", "FP32", []),
        )  # fmt: skip
        ((first,), (second,)) = (sent("--input random --batch-size 5") for _ in range(2))
        assert {name: (array.dtype.name, array.shape) for name, array in first.items()} == {
            "F": ("float16", (5, 3)), "I": ("int64", (5,)), "B": ("bool", (2, 2)), "T": ("object", (5, 1)),
            "S": ("float32", (1,)),
        }  # fmt: skip
        assert set(first["I"].tolist()) <= {0, 1}
        assert set(first["T"].ravel()) == {b"text"}
        for name in first:
            np.testing.assert_array_equal(first[name], second[name])
        self.declare(client, ("X", "FP32", [-1, -1, 3]))
        assert "'X' has no fixed shape: [-1, -1, 3] (send your own: --samples FILE.npz)" in sent("")

    @pytest.mark.parametrize(("declared", "shape"), [([-1, 3, 2, 2], (1, 3, 2, 2)), ([3, 2, 2], (3, 2, 2))])
    def test_image_is_preprocessed(self, sent: Any, client: FakeClient, declared: list[int], shape: Any) -> None:
        Image.new("RGB", (8, 6), (255, 0, 0)).save("red.png")
        self.declare(client, ("X", "FP32", declared))
        (feeds,) = sent("--input red.png")
        assert feeds["X"].shape == shape
        assert feeds["X"].reshape(3, -1)[:, 0].tolist() == [1.0, 0.0, 0.0]
        self.declare(client, ("X", "FP32", declared), ("Y", "FP32", declared))
        assert "has 2 inputs" in sent("--input red.png")

    def test_tensors_from_files(self, sent: Any) -> None:
        np.save("a.npy", np.ones(3))
        (feeds,) = sent("--input A=a.npy --input B=a.npy")
        assert list(feeds) == ["A", "B"]
        assert "--batch-size applies" in sent("--input A=a.npy --batch-size 2")

    @pytest.mark.parametrize("shape", [[-1, 1], [1]])
    def test_image_model_gets_encoded_images(self, sent: Any, client: FakeClient, shape: list[int]) -> None:
        Path("photos").mkdir()
        Image.new("L", (4, 4), 255).save("photos/a.png")
        content = Path("photos/a.png").read_bytes()
        client.fake_model.config = {"parameters": {"tensor_model": {"string_value": "m"}}}
        self.declare(client, ("IMAGE", "BYTES", shape))
        for option in ("--input photos/a.png", "--samples photos"):
            (feeds,) = sent(option)
            assert (feeds["IMAGE"].ndim, feeds["IMAGE"].ravel().tolist()) == (len(shape), [content])
        assert "requires encoded images" in sent("")
        assert "cannot read b.png: No such file" in sent("--input b.png")
        Path("photos/b.png").write_bytes(b"hello")
        assert "b.png: 5 bytes is not an image in a known format" in sent("--samples photos")

    def test_batch_size_of_a_model_without_batches(self, sent: Any, client: FakeClient) -> None:
        self.declare(client, ("X", "FP32", [2, 2]))
        assert sent("")[0]["X"].shape == (2, 2)
        assert "does not support batches (remove --batch-size 8)" in sent("--batch-size 8")
        np.savez("a.npz", X=ROWS)
        assert "does not support batches" in sent("--samples a.npz --batch-size 2")

    def test_error_of_the_model_precedes_the_load(self, run: RunVerb, loads: Loads, client: FakeClient) -> None:
        client.fake_model.error = ServerError("no such tensor")
        finished = run("bench", "--model", "m")
        assert (finished.code, finished.err) == (1, "graphkiln: no such tensor\n")
        assert loads.calls == []
        assert client.open == 0
