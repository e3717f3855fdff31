"""The command of the benchmarks: what runs, what is printed, what is kept."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import benchmark
import pytest
import reporting
import server_speed
import story_speed
from measurement import Summary
from stories import CHAIN, make_observation, story_document

from graphkiln.story.runner import Progress
from graphkiln_backend.graph.errors import MeasurementError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """Benchmarks that ran; none of them measures anything."""
    found: list[tuple[str, int, float]] = []

    def fake(name: str) -> Any:
        def run(rounds: int, seconds: float) -> list[dict[str, object]]:
            found.append((name, rounds, seconds))
            return [{"set-up": name, "ratio": 1.5}]

        return run

    monkeypatch.setattr(benchmark, "BENCHMARKS", {name: (fake(name), f"what {name} is") for name in ("one", "two")})
    return found


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was kept, and whether the tables were written."""
    found: list[str] = []
    monkeypatch.setattr(reporting, "save_result", lambda name, *_: found.append(name))
    monkeypatch.setattr(reporting, "write_tables", lambda: found.append("tables"))
    return found


def run(monkeypatch: pytest.MonkeyPatch, *words: str) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmark", *words])
    benchmark.main()


class TestCommand:
    def test_prints_a_table(
        self, ran: list[Any], kept: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        run(monkeypatch, "one", "--rounds", "2", "--seconds", "0.5")
        assert ran == [("one", 2, 0.5)]
        assert kept == []
        out = " ".join(capsys.readouterr().out.split())
        assert "what one is" in out
        assert "1.5" in out

    def test_or_json(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ran: list[Any]) -> None:
        run(monkeypatch, "two", "--json")
        document = json.loads(capsys.readouterr().out)
        assert document["rows"] == [{"set-up": "two", "ratio": 1.5}]
        assert set(document) == {"cores", "load_average", "rows"}
        assert ran == [("two", 5, 3.0)]

    @pytest.mark.parametrize(
        ("words", "names"),
        [
            (["one", "--save"], ["one", "tables"]),
            (["all"], ["one", "two", "tables"]),
            (["report"], ["tables"]),
        ],
    )
    @pytest.mark.usefixtures("ran")
    def test_keeps_results(
        self, kept: list[str], monkeypatch: pytest.MonkeyPatch, words: list[str], names: list[str]
    ) -> None:
        run(monkeypatch, *words)
        assert kept == names

    @pytest.mark.usefixtures("kept")
    def test_all_goes_on_where_one_fails(
        self, ran: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: object) -> list[dict[str, object]]:
            sys.exit("no weights")

        monkeypatch.setattr(benchmark, "BENCHMARKS", {"bad": (fail, "bad"), **benchmark.BENCHMARKS})
        with pytest.raises(SystemExit, match="failed: bad"):
            run(monkeypatch, "all")
        assert [name for name, *_ in ran] == ["one", "two"]
        assert "bad: no weights" in capsys.readouterr().err

    def test_all_says_what_kind_of_error_nobody_foresaw(
        self, kept: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: object) -> list[dict[str, object]]:
            raise KeyError("x")

        monkeypatch.setattr(benchmark, "BENCHMARKS", {"bad": (fail, "bad")})
        with pytest.raises(SystemExit, match="failed: bad"):
            run(monkeypatch, "all")
        assert "bad: KeyError: 'x'" in capsys.readouterr().err
        assert kept == ["tables"]

    def test_all_that_is_stopped_keeps_what_was_measured_and_names_the_rest(
        self, ran: list[Any], kept: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def stop(*_: object) -> list[dict[str, object]]:
            raise KeyboardInterrupt

        first, second = benchmark.BENCHMARKS.items()
        monkeypatch.setattr(benchmark, "BENCHMARKS", dict([first, ("stopped", (stop, "stopped")), second]))
        with pytest.raises(KeyboardInterrupt):
            run(monkeypatch, "all")
        assert [name for name, *_ in ran] == ["one"]
        assert kept == ["one", "tables"]
        assert "not measured: stopped, two" in capsys.readouterr().err

    def test_one_that_measured_nothing_is_not_kept(self, kept: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(benchmark, "BENCHMARKS", {"none": (lambda *_: [], "none")})
        with pytest.raises(MeasurementError, match="none measured nothing"):
            run(monkeypatch, "none", "--save")
        assert kept == []

    @pytest.mark.parametrize(
        ("words", "told"),
        [
            (["one", "--rounds", "0"], "--rounds 0: expected at least 1"),
            (["one", "--seconds", "0"], "--seconds 0: expected more than 0"),
            (["one", "--seconds", "nan"], "--seconds nan: expected more than 0"),
            (["one", "--only", "x"], "--only says nothing to one"),
            (["all", "--only", "x"], "--only says nothing to all"),
            (["one", "--budget", "5"], "--budget says nothing to one"),
            (["report", "--cpp-backend", "x"], "--cpp-backend says nothing to report"),
        ],
    )
    def test_options_that_nothing_would_heed_are_refused(
        self,
        ran: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        words: list[str],
        told: str,
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *words)
        assert ended.value.code == 2
        assert told in capsys.readouterr().err
        assert ran == []

    @pytest.mark.parametrize("words", [["compare"], ["compare", "a"], ["compare", "a", "b", "c"], ["one", "a"]])
    @pytest.mark.usefixtures("ran")
    def test_compare_takes_two_results(self, monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *words)
        assert ended.value.code == 2

    @pytest.mark.parametrize(("ratio", "code"), [(1.5, 0), (1.2, 1)])
    def test_a_regression_costs_the_exit_code(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
        ratio: float,
        code: int,
    ) -> None:
        for name, value in (("old", 1.5), ("new", ratio)):
            (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [{"set-up": "x", "ratio": value}]}))
        for extra in ([], ["--json"]):
            with pytest.raises(SystemExit) as ended:
                run(monkeypatch, "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"), *extra)
            assert ended.value.code == code
            assert ("REGRESSION" in capsys.readouterr().out) == bool(code)

    def test_results_that_cannot_be_compared_are_a_mistake(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"))
        assert ended.value.code == 2
        assert "old.json is no result of scripts/benchmark" in capsys.readouterr().err

    def test_what_is_not_compared_is_told_beside_the_table(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        for name in ("old", "new"):
            (tmp_path / f"{name}.json").write_text(json.dumps({"rows": [{"set-up": "x"}]}))
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "compare", str(tmp_path / "old.json"), str(tmp_path / "new.json"))
        told = capsys.readouterr()
        assert ended.value.code == 2
        assert "no ratio to compare" in told.out
        assert "new: has no ratio, not compared" in told.err

    def test_an_unknown_benchmark_is_named(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, "speed")
        assert ended.value.code == 2
        assert "speed" in capsys.readouterr().err


def test_every_benchmark_is_described_in_the_help() -> None:
    described = re.findall(r"^    scripts/benchmark (\w+) ", str(benchmark.__doc__), re.M)
    assert sorted(described) == sorted([*benchmark.BENCHMARKS, "all", "compare", "report"])


def test_results_that_are_kept_are_of_known_benchmarks(repository: Path) -> None:
    kept = {path.stem for path in (repository / "docs" / "benchmarks").glob("*.json")}
    assert kept
    assert kept <= set(benchmark.BENCHMARKS)


class TestServerSpeed:
    def test_ratios_are_to_the_bare_session(self) -> None:
        summaries = {
            "bare": Summary(per_second=100.0, p50_ms=10.0, p99_ms=11.0),
            "served": Summary(per_second=90.04, p50_ms=11.116, p99_ms=12.0),
        }
        assert server_speed._ratios("m", summaries, "bare")[1] == {
            "model": "m", "set-up": "served", "requests/s": 90.0, "ratio": 0.9, "spread": 0.0, "p50 ms": 11.12,
            "p99 ms": 12.0,
        }  # fmt: skip

    def test_means_are_of_what_came_between_two_readings(self) -> None:
        before, after = {"infer": (1_000_000, 10)}, {"infer": (5_000_000, 30)}
        assert server_speed._mean_us(before, after) == {"infer": 200.0}


class TestStorySpeed:
    def test_a_row_is_a_step_as_people_read_it(self) -> None:
        document = story_document(
            **{variant.key: make_observation(10.0) for variant in CHAIN},
        )
        rows = [story_speed._row(step) for step in document["steps"]]
        assert [row["step"] for row in rows] == ["0: eager", "1: static", "2: reduced", "4, by itself: int8"]
        assert rows[1] == {
            "step": "1: static", "images/s": 10.0, "own": "1.00x", "all so far": "1.00x", "source": "1.25",
            "p50 ms": 100.0, "p99 ms": 100.0, "error": "1.0e-06", "same answers": "200/200", "right": "-", "MB": 100,
            "cores": 1.5,
        }  # fmt: skip
        assert rows[3]["all so far"] == "-"

    def test_without_trained_weights_it_says_what_to_do(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        with pytest.raises(SystemExit, match="scripts/train-story"):
            story_speed.benchmark_story(1, 1.0)

    def test_progress_is_one_line(self, capsys: pytest.CaptureFixture[str]) -> None:
        story_speed._print_progress(Progress(activity="static", figure="static: 3 images/s"))
        assert capsys.readouterr().err == "\r\033[Kstatic static: 3 images/s"


@pytest.mark.parametrize("words", [[], ["--cpp-backend", "somewhere"]])
def test_the_cpp_backend_is_handed_to_benchmarks_beside_it(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    found: list[object] = []

    def fake(rounds: int, seconds: float, cpp_backend: Path | None) -> list[dict[str, object]]:
        found.extend((rounds, seconds, cpp_backend))
        return [{"set-up": "x", "ratio": 1.0}]

    monkeypatch.setitem(benchmark.BENCHMARKS, "light", (fake, "light"))
    run(monkeypatch, "light", "--rounds", "1", *words)
    assert found == [1, 3.0, Path("somewhere") if words else None]


def test_a_budget_is_handed_to_searches_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[object] = []

    def fake(rounds: int, seconds: float, only: str, budget_s: float) -> list[dict[str, object]]:
        found.extend((rounds, seconds, only, budget_s))
        return [{"set-up": "x", "ratio": 1.0}]

    monkeypatch.setitem(benchmark.BENCHMARKS, "tune", (fake, "tune"))
    run(monkeypatch, "tune", "--only", "vit_tiny", "--budget", "480")
    assert found == [5, 3.0, "vit_tiny", 480.0]


@pytest.mark.parametrize(("words", "rounds", "seconds"), [([], 2, 1.0), (["--rounds", "4", "--seconds", "4"], 4, 4.0)])
def test_a_benchmark_of_long_requests_has_rounds_of_its_own(
    monkeypatch: pytest.MonkeyPatch, words: list[str], rounds: int, seconds: float
) -> None:
    found: list[object] = []

    def fake(rounds: int, seconds: float, only: str) -> list[dict[str, object]]:
        found.extend((rounds, seconds, only))
        return [{"set-up": "x", "ratio": 1.0}]

    monkeypatch.setitem(benchmark.BENCHMARKS, "parallel", (fake, "parallel"))
    run(monkeypatch, "parallel", "--only", "bert_base", *words)
    assert found == [rounds, seconds, "bert_base"]
