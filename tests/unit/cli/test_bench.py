"""`graphkiln bench` with a fake load generator: loads, inputs, tables, reports and mistakes."""

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
from commands import FakeClient, FakeModel, RunVerb
from PIL import Image

from graphkiln.bench import processes as load_processes
from graphkiln.bench.generator import Measurement
from graphkiln.bench.processes import Feeds, Load, Target
from graphkiln.cli.bench_requests import read_feeds, read_samples
from graphkiln_backend.graph.errors import ConnectionFailed, InvalidInput, ServerError

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
def arrivals(run: RunVerb, loads: Loads) -> Callable[..., tuple[Load, list[float]]]:
    """Run an open loop; return its load and due times."""

    def run_bench(*words: object) -> tuple[Load, list[float]]:
        assert run("bench", "--model", "m", *words).code == 0
        load = loads.calls[-1]
        assert load.arrivals is not None
        return load, load.arrivals.tolist()

    return run_bench


@pytest.mark.usefixtures("client")
def test_rate_is_an_open_loop(arrivals: Any) -> None:
    load, even = arrivals("--rate", 4, "--arrivals", "constant", "--duration", 1, "--warmup", 0.5)
    assert (load.callers, even) == (256, [0, 0.25, 0.5, 0.75, 1, 1.25])
    _, random = arrivals("--rate", 100)
    assert len(random) == pytest.approx(100 * 11, rel=0.2)
    assert random == arrivals("--rate", 100, "--arrivals", "poisson")[1]
    _, together = arrivals("--rate", 100, "--burst", 5)
    assert {int(size) % 5 for size in np.unique(together, return_counts=True)[1]} == {0}


@pytest.mark.usefixtures("client")
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
        *((f"--concurrency {text}", "expected numbers from 1") for text in ("0", "1,0", "two", "1,,2", "1,4097")),
        ("--concurrency 2 --rate 5", "--concurrency and --rate are mutually exclusive"),
        ("--rate 5 --trace none.csv", "mutually exclusive"),
        ("--burst 5", "add --rate"),
        ("--arrivals constant --concurrency 2", "add --rate"),
        ("--rate 5 --burst 5 --arrivals constant", "--burst and --arrivals"),
        ("--rate inf", "inf requests per second for 11 s"),
        ("--rate 1e9 --duration 1", "requests per second for 2 s is out of range"),
        ("--rate 1 --duration inf", "1 requests per second for inf s"),
        ("--duration 1e10", "a run of 1e+10 s"),
        ("--duration nan", "duration"),
        ("--trace endless.csv", "1e+300 s is out of range"),
        ("--rate 0.01 --duration 1", "no request is due in"),
        ("--rate 5 --burst 1000000", "no request is due in"),
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


class TestInputs:
    def test_samples_are_sent(self, run: RunVerb, client: FakeClient, loads: Loads, tmp_path: Path) -> None:
        np.savez(tmp_path / "s.npz", X=np.arange(12, dtype=np.float32).reshape(3, 2, 2))
        assert run("bench", "--model", "m", "--samples", tmp_path / "s.npz").code == 0
        assert [feeds["X"].shape for feeds in loads.samples[0]] == [(1, 2, 2)] * 3
        assert len(client.fake_model.fed) == 1  # the first one is checked before the load
        assert client.open == 0

    def test_error_of_the_model_precedes_the_load(self, run: RunVerb, loads: Loads, client: FakeClient) -> None:
        client.fake_model.error = ServerError("no such tensor")
        finished = run("bench", "--model", "m")
        assert (finished.code, finished.err) == (1, "graphkiln: no such tensor\n")
        assert loads.calls == []
        assert client.open == 0


class TestTables:
    def cells(self, out: str) -> list[list[str]]:
        return [[cell.strip() for cell in line.split("│")[1:-1]] for line in out.splitlines() if "│" in line]

    @pytest.mark.usefixtures("client", "loads")
    def test_tables_of_client_and_server(self, run: RunVerb) -> None:
        out = run("bench", "--model", "m").out
        client, server = self.cells(out)
        assert "sent by graphkiln in 3 processes, using up to" in " ".join(out.split())
        assert client == ["1", "100.0 ± 3.0", "1.50", "2.00", "3.25", "4.00", "0.25"]
        assert server == ["1", "10", "20", "300", "40", "5.0", "-"]  # means of one request, and the batch
        assert "±: 95% interval of the rate" in " ".join(out.split())

    @pytest.mark.usefixtures("client")
    def test_errors_and_unsent_requests(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(), measurement(errors={"Overloaded": 3, "ServerError": 1}, unsent=7)]
        finished = run("bench", "--model", "m", "--concurrency", "1,2")
        assert finished.code == 1
        rows = self.cells(finished.out)
        first, second = (next(row for row in rows if row[0] == load and len(row) == 9) for load in "12")
        assert first[-2:] == ["0", "0"]
        assert second[-1] == "7"
        errors = "".join(row[-2] for row in rows[rows.index(second) :] if len(row) == 9)
        assert errors.replace(" ", "") == "3Overloaded1ServerError"  # folded, not truncated

    @pytest.mark.usefixtures("client")
    def test_run_without_answers(self, run: RunVerb, loads: Loads) -> None:
        loads.results = [measurement(latency_ms={}, per_second=0.0, per_second_range=(0.0, 0.0), answered=0)]
        (client, _) = self.cells(run("bench", "--model", "m").out)
        assert client[1:6] == ["0.0 ± 0.0", "-", "-", "-", "-"]

    @pytest.mark.usefixtures("client")
    @pytest.mark.parametrize(
        ("due", "answered", "is_noted"), [(200, 195, False), (200, 150, True), (9, 5, False), (0, 9, False)]
    )
    def test_missed_rate_is_noted(self, run: RunVerb, loads: Loads, due: int, answered: int, is_noted: bool) -> None:
        loads.results = [measurement(due=due, answered=answered)]
        out = " ".join(run("bench", "--model", "m", "--rate", "100").out.split())

        assert (f"only {answered / 2:.1f} of {due / 2:.1f} requests per second" in out) is is_noted

    @pytest.mark.usefixtures("client")
    @pytest.mark.parametrize(
        ("answered", "few"), [(1, "p50, p90, p99, p99.9"), (99, "p99, p99.9"), (100, "p99.9"), (1000, ""), (0, "")]
    )
    def test_percentiles_of_few_requests_are_noted(self, run: RunVerb, loads: Loads, answered: int, few: str) -> None:
        loads.results = [measurement(answered=answered)]
        out = " ".join(run("bench", "--model", "m").out.split())

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
        measured, served = self.cells(finished.out)
        assert measured[2] == "1.50"
        assert served == ["1", "-", "-", "-", "-", "-", "-"]
        assert "the server was restarted or is gone" in " ".join(finished.out.split())
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


# Inputs: random, given, or samples.

ROWS = np.arange(20, dtype=np.float32).reshape(5, 2, 2)


def read(path: Path, size: int = 1) -> list[Any]:
    model: Any = FakeModel()
    return [feeds["X"] for feeds in read_samples(model, path, size)]


def test_rows_of_an_archive_are_requests(tmp_path: Path) -> None:
    np.savez(tmp_path / "s.npz", X=ROWS)
    found = read(tmp_path / "s.npz")
    np.testing.assert_array_equal(np.concatenate(found), ROWS)

    assert {array.shape for array in found} == {(1, 2, 2)}
    assert [array.shape for array in read(tmp_path / "s.npz", 2)] == [(2, 2, 2)] * 2


def test_golden_samples(tmp_path: Path, repository: Path) -> None:
    np.savez(tmp_path / "golden.npz", **{"input/X": ROWS, "source/Y": ROWS, "graph/Y": ROWS})
    for path in (tmp_path, tmp_path / "golden.npz"):
        assert len(read(path)) == 5
    model: Any = FakeModel()
    digits = read_samples(model, repository / "model_repository" / "digits" / "1", 1)
    assert {name: array.shape for name, array in digits[0].items()} == {"INPUT_0": (1, 1, 32, 32)}


def test_samples_of_a_model_without_batches(tmp_path: Path) -> None:
    np.savez(tmp_path / "golden.npz", **{"input/X": ROWS, "graph/Y": ROWS})
    model: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [2, 2]}])
    found = [feeds["X"] for feeds in read_samples(model, tmp_path, 1)]
    np.testing.assert_array_equal(np.stack(found), ROWS)


def test_folder_of_images_and_archives(tmp_path: Path) -> None:
    for name in (".DS_Store", "._b.png"):
        (tmp_path / name).write_bytes(b"no image")
    Image.new("L", (4, 4), 255).save(tmp_path / "b.png")
    np.savez(tmp_path / "a.npz", X=ROWS[:3])
    model: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [-1, 3, 2, 2]}])
    first, second = read_samples(model, tmp_path, 1)
    assert (first["X"].shape, second["X"].shape) == ((3, 2, 2), (1, 3, 2, 2))


@pytest.mark.parametrize(
    ("arrays", "size", "words"),
    [
        ({"X": ROWS, "Z": ROWS[:2]}, 1, r"row for each sample, got X \[5, 2, 2\], Z \[2, 2, 2\]"),
        ({"X": ROWS}, 6, "5 samples are fewer than --batch-size 6"),
        ({"X": ROWS[:0]}, 1, "is empty"),
        ({"X": np.float32(1)}, 1, "is empty"),
        ({}, 1, "a row for each sample"),
    ],
)
def test_invalid_archives(tmp_path: Path, arrays: dict[str, Any], size: int, words: str) -> None:
    np.savez(tmp_path / "s.npz", **arrays)
    with pytest.raises(InvalidInput, match=words):
        read(tmp_path / "s.npz", size)


def test_invalid_paths(tmp_path: Path) -> None:
    (tmp_path / "bad.npz").write_text("no archive")
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("no image")
    for name in ("bad.npz", "empty", "nowhere", "nowhere.npz", "texts"):
        with pytest.raises(InvalidInput):
            read(tmp_path / name)


def test_random_inputs_are_reproducible() -> None:
    rows = [
        ("F", "FP16", [-1, 3]),
        ("I", "INT64", [-1]),
        ("B", "BOOL", [2, 2]),
        ("T", "BYTES", [-1, 1]),
        ("S", "FP32", []),
    ]
    model: Any = FakeModel(inputs=[{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in rows])
    first, second = (read_feeds(model, ["random"], 5) for _ in range(2))
    assert {name: (array.dtype.name, array.shape) for name, array in first.items()} == {
        "F": ("float16", (5, 3)), "I": ("int64", (5,)), "B": ("bool", (2, 2)), "T": ("object", (5, 1)),
        "S": ("float32", (1,)),
    }  # fmt: skip
    assert set(first["I"].tolist()) <= {0, 1}
    assert set(first["T"].ravel()) == {b"text"}
    for name in first:
        np.testing.assert_array_equal(first[name], second[name])
    unknown: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [-1, -1, 3]}])
    with pytest.raises(InvalidInput, match=r"'X' has no fixed shape: \[-1, -1, 3\].*--input NAME=FILE.npy"):
        read_feeds(unknown, ["random"], 1)


@pytest.mark.parametrize(("declared", "shape"), [([-1, 3, 2, 2], (1, 3, 2, 2)), ([3, 2, 2], (3, 2, 2))])
def test_image_is_preprocessed(tmp_path: Path, declared: list[int], shape: Any) -> None:
    Image.new("RGB", (8, 6), (255, 0, 0)).save(tmp_path / "red.png")
    model: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": declared}])
    fed = read_feeds(model, [str(tmp_path / "red.png")], 1)["X"]
    assert fed.shape == shape
    assert fed.reshape(3, -1)[:, 0].tolist() == [1.0, 0.0, 0.0]
    model.inputs *= 2
    with pytest.raises(InvalidInput, match="has 2 inputs"):
        read_feeds(model, [str(tmp_path / "red.png")], 1)


def test_tensors_from_files(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.ones(3))
    model: Any = FakeModel()
    assert list(read_feeds(model, [f"A={tmp_path / 'a.npy'}", f"B={tmp_path / 'a.npy'}"], 1)) == ["A", "B"]


def test_image_model_gets_encoded_images(tmp_path: Path) -> None:
    Image.new("L", (4, 4), 255).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    config = {"parameters": {"tensor_model": {"string_value": "m"}}}
    for shape, expected in (([-1, 1], (1, 1)), ([1], (1,))):
        inputs = [{"name": "IMAGE", "datatype": "BYTES", "shape": shape}]
        model: Any = FakeModel(name="m.images", inputs=inputs, config=config)
        for feeds in (read_feeds(model, [str(tmp_path / "a.png")], 1), *read_samples(model, tmp_path, 1)):
            assert (feeds["IMAGE"].shape, feeds["IMAGE"].ravel().tolist()) == (expected, [content])
        with pytest.raises(InvalidInput, match=r"'m\.images' requires encoded images"):
            read_feeds(model, ["random"], 1)
        with pytest.raises(InvalidInput, match=r"cannot read .*b\.png: No such file"):
            read_feeds(model, [str(tmp_path / "b.png")], 1)
        (tmp_path / "b.png").write_bytes(b"hello")
        with pytest.raises(InvalidInput, match=r"b\.png: 5 bytes is not an image in a known format"):
            read_samples(model, tmp_path, 1)
        (tmp_path / "b.png").unlink()


def test_batch_size_without_effect_is_refused(tmp_path: Path) -> None:
    whole: Any = FakeModel(inputs=[{"name": "X", "datatype": "FP32", "shape": [2, 2]}])
    assert read_feeds(whole, ["random"], 1)["X"].shape == (2, 2)
    with pytest.raises(InvalidInput, match=r"batches.*--batch-size 8"):
        read_feeds(whole, ["random"], 8)
    np.savez(tmp_path / "a.npz", X=ROWS)
    with pytest.raises(InvalidInput, match="does not support batches"):
        read_samples(whole, tmp_path / "a.npz", 2)
    with pytest.raises(InvalidInput, match="--batch-size applies"):
        read_feeds(whole, [f"X={tmp_path / 'a.npz'}"], 2)
    assert len(read(tmp_path)) == 1
    with pytest.raises(InvalidInput, match=r"--batch-size 2: each file of .* is a request"):
        read(tmp_path, 2)
