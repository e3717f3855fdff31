"""`graphkiln replay`: rows of a record answered by the same and by other versions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import zoo
from commands import RunVerb, words
from onnx import helper
from recorded import Pair, origin, settings, write_record

from graphkiln_backend.triton.recording import Recorder

SHAPE = ("batch", 3)


def planted() -> onnx.ModelProto:
    """`y = 2x`, or `-2x` where the first element is above 0.99."""
    nodes = [
        helper.make_node("Split", ["x"], ["first", "rest"], axis=1),
        helper.make_node("Greater", ["first", "limit"], ["is_planted"]),
        helper.make_node("Where", ["is_planted", "wrong", "right"], ["factor"]),
        helper.make_node("Mul", ["x", "factor"], ["y"]),
    ]
    constants = {
        "limit": np.float32(0.99), "wrong": np.float32(-2), "right": np.float32(2), "sizes": np.array([1, 2], np.int64),
    }  # fmt: skip
    nodes[0].input.append("sizes")
    return zoo.model(nodes, [zoo.value("x", SHAPE)], [zoo.value("y", SHAPE)], constants)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Versions of `m`: double, the same with planted differences, and one with another input."""
    zoo.add(tmp_path / "store", "m", zoo.scale(SHAPE), "max_batch_size: 8", version=1)
    zoo.add(tmp_path / "store", "m", planted(), version=2)
    zoo.add(tmp_path / "store", "other", zoo.scale(("batch", 4)), "max_batch_size: 8")
    return tmp_path / "store"


def requests(count: int, rows: int = 1) -> Iterator[Pair]:
    generator = np.random.default_rng(7)
    for _ in range(count):
        inputs = generator.random((rows, 3), np.float32)
        yield {"x": inputs}, {"y": inputs * np.float32(2)}


def replayed(run: RunVerb, *arguments: object) -> tuple[int, Any]:
    finished = run("replay", *arguments, "--cache=off", "--json")
    assert finished.out, finished.err
    return finished.code, json.loads(finished.out)


def test_ten_thousand_requests_of_the_same_version(run: RunVerb, store: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record", requests(10_000))
    code, document = replayed(run, tmp_path / "record", "--model", f"{store / 'm'}:1")
    assert code == 0
    assert (document["requests"], document["same_decision"], document["bit_equal"]) == (10_000,) * 3
    assert (document["outside_policy"], document["changed"]) == (0, [])
    assert document["same_decision_interval"] == [pytest.approx(0.99963, abs=1e-5), 1]


def test_exactly_the_rows_that_differ(run: RunVerb, store: Path, tmp_path: Path) -> None:
    pairs = list(requests(10_000))
    expected = {str(number) for number, (inputs, _) in enumerate(pairs) if inputs["x"][0, 0] > 0.99}
    assert 50 < len(expected) < 200
    write_record(tmp_path / "record", pairs)
    code, document = replayed(run, tmp_path / "record", "--model", store / "m")
    assert (code, document["version"], document["answered_by_versions"]) == (1, 2, {"1": 10_000})
    assert {row["request_id"] for row in document["changed"]} == expected
    assert len(document["changed"]) == len(expected) == 10_000 - document["same_decision"]
    assert document["bit_equal"] == document["same_decision"]
    assert all(not row["same_decision"] and "relative L2" in row["difference"] for row in document["changed"])
    low, high = document["same_decision_interval"]
    assert low < 1 - len(expected) / 10_000 < high


def test_requests_of_several_rows(run: RunVerb, store: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record", requests(100, rows=5))
    assert replayed(run, tmp_path / "record", "--model", f"{store / 'm'}:1")[0] == 0
    code, document = replayed(run, tmp_path / "record", "--model", store / "m" / "2")
    changed = sum(bool((inputs["x"][:, 0] > 0.99).any()) for inputs, _ in requests(100, rows=5))
    assert (code, 100 - document["same_decision"]) == (1, changed)


def test_table(run: RunVerb, store: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record", requests(2000))
    finished = run("replay", tmp_path / "record" / "m", "--model", store / "m", "--cache=off")
    assert finished.code == 1
    shown = words(finished.out)
    assert "requests 2,000 of m (version 1: 2,000)" in shown
    assert re.search(r"same decision 1,9\d\d of 2,000 = 9\d\.\d\d% \(95%: 9\d\.\d\d% to", shown)
    assert shown.count("changed") == 10
    assert re.search(r"more \d+: --json or --html", shown)


def test_page_with_numbers(run: RunVerb, store: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record", requests(500), model="m")
    finished = run("replay", tmp_path / "record", "--model", store / "m", "--cache=off", "--html", tmp_path / "r.html")
    assert finished.code == 1
    page = (tmp_path / "r.html").read_text()
    assert re.search(r"\d of 500 decisions changed: m 2", page)
    assert "x [1, 3]: 0.99" in page
    assert "<img" not in page


def test_page_with_pictures(run: RunVerb, digits: Path, tmp_path: Path) -> None:
    image = np.zeros((2, 1, 32, 32), np.float32)
    wrong = np.eye(10, dtype=np.float32)[[3, 3]]
    write_record(tmp_path / "record", [({"INPUT_0": image}, {"OUTPUT_0": wrong})], model="digits")
    run("replay", tmp_path / "record", "--model", digits, "--cache=off", "--html", tmp_path / "r.html")
    page = (tmp_path / "r.html").read_text()
    assert re.search(r'<td><img src="data:image/png;base64,[^"]+" alt="first of 2 images" width="96"></td>', page)
    assert re.search(r"three 1 -&gt; \w+", page)


def test_ids_from_clients_are_escaped(run: RunVerb, store: Path, tmp_path: Path) -> None:
    (tmp_path / "record").mkdir()
    with Recorder(settings(tmp_path / "record"), origin()) as recorder:
        inputs = {"x": np.array([[3, 2, 1]], np.float32)}
        recorder.record("<b>\x1b[31m", inputs, {"y": np.eye(3, dtype=np.float32)[:1, ::-1]}, 1e-3)
    arguments = (tmp_path / "record", "--model", store / "m", "--cache=off", "--html", tmp_path / "r.html")
    assert "<b>\\x1b[31m" in words(run("replay", *arguments).out)
    assert "&lt;b&gt;" in (tmp_path / "r.html").read_text()


def test_since_and_limit(run: RunVerb, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_record(tmp_path / "record", requests(20))
    now_ns = time.time_ns() - 3 * 3600 * 10**9
    with monkeypatch.context() as earlier:
        earlier.setattr(time, "time_ns", lambda: now_ns)
        write_record(tmp_path / "record", requests(10))
    model = f"{store / 'm'}:1"
    counts = {
        options: replayed(run, tmp_path / "record", "--model", model, *options)[1]["requests"]
        for options in ((), ("--limit=5",), ("--since=2h",), ("--since=4h",))
    }
    assert list(counts.values()) == [30, 5, 20, 30]
    finished = run("replay", tmp_path / "record", "--model", model, "--since", "1us", "--cache=off")
    assert finished.code == 2
    assert "holds no request of this time (it holds 30: leave out --since)" in finished.err


def test_digests_cannot_be_replayed(run: RunVerb, store: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record", requests(2), inputs="digest")
    finished = run("replay", tmp_path / "record", "--model", store / "m", "--cache=off")
    assert finished.code == 2
    assert "nothing can be replayed" in finished.err
    assert "serve with --record-inputs full" in finished.err
    write_record(tmp_path / "record", requests(2))
    assert replayed(run, tmp_path / "record", "--model", f"{store / 'm'}:1")[1]["digests_left_out"] == 2


def test_requests_that_do_not_fit_the_version(run: RunVerb, store: Path, tmp_path: Path) -> None:
    write_record(tmp_path / "record", requests(3), model="other")
    code, document = replayed(run, tmp_path / "record", "--model", store / "other")
    assert (code, document["same_decision"]) == (1, 0)
    assert "not answered: wrong size in dimension 1 of input 'x'" in document["changed"][0]["difference"]


def test_limits_follow_the_lower_precision(run: RunVerb, store: Path, tmp_path: Path) -> None:
    pairs = [({"x": inputs["x"]}, {"y": outputs["y"] * np.float32(1.01)}) for inputs, outputs in requests(5)]
    write_record(tmp_path / "record", pairs)
    code, document = replayed(run, tmp_path / "record", "--model", f"{store / 'm'}:1")
    assert (code, document["outside_policy"], document["same_decision"]) == (1, 5, 0)
    write_record(tmp_path / "bf16", pairs, precision="bf16")
    assert replayed(run, tmp_path / "bf16", "--model", f"{store / 'm'}:1")[1]["outside_policy"] == 0


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["nowhere", "--model", "store/m"], "nowhere"),
        (["store", "--model", "store/m"], "holds no recorded requests"),
        (["record", "--model", "store/m:9"], "store/m/9"),
        (["record", "--model", "store/m", "--since", "soon"], "--since soon: expected a time such as 2h"),
    ],
)
@pytest.mark.usefixtures("store")
def test_mistakes(
    run: RunVerb, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_record(tmp_path / "record", requests(1))
    finished = run("replay", *arguments, "--cache=off")
    assert finished.code == 2
    assert reason in finished.err
