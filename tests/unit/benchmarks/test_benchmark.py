"""The command `scripts/benchmark`: what runs, is printed and is saved."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import benchmark
import pytest
import reporting

from graphkiln_backend.graph.errors import MeasurementError


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, float]]:
    """Benchmarks that ran, without measuring."""
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
    """Saved results, and whether the tables were written."""
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
    def test_all_continues_after_a_failure(
        self, ran: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def fail(*_: object) -> list[dict[str, object]]:
            sys.exit("no weights")

        monkeypatch.setattr(benchmark, "BENCHMARKS", {"bad": (fail, "bad"), **benchmark.BENCHMARKS})
        with pytest.raises(SystemExit, match="failed: bad"):
            run(monkeypatch, "all")
        assert [name for name, *_ in ran] == ["one", "two"]
        assert "bad: no weights" in capsys.readouterr().err

    def test_all_interrupted_saves_results_and_names_the_rest(
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

    def test_an_empty_result_is_not_saved(self, kept: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(benchmark, "BENCHMARKS", {"none": (lambda *_: [], "none")})
        with pytest.raises(MeasurementError, match="none measured nothing"):
            run(monkeypatch, "none", "--save")
        assert kept == []

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["one", "--rounds", "0"], "--rounds 0: expected at least 1"),
            (["one", "--seconds", "0"], "--seconds 0: expected more than 0"),
            (["one", "--seconds", "nan"], "--seconds nan: expected more than 0"),
            (["one", "--only", "x"], "--only does not apply to one"),
            (["all", "--only", "x"], "--only does not apply to all"),
            (["one", "--budget", "5"], "--budget does not apply to one"),
            (["report", "--cpp-backend", "x"], "--cpp-backend does not apply to report"),
        ],
    )
    def test_options_without_effect_are_refused(
        self,
        ran: list[Any],
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
        words: list[str],
        message: str,
    ) -> None:
        with pytest.raises(SystemExit) as ended:
            run(monkeypatch, *words)
        assert ended.value.code == 2
        assert message in capsys.readouterr().err
        assert ran == []


def test_every_benchmark_is_described_in_the_help() -> None:
    described = re.findall(r"^    scripts/benchmark (\w+) ", str(benchmark.__doc__), re.M)
    assert sorted(described) == sorted([*benchmark.BENCHMARKS, "all", "report"])


def test_saved_results_are_of_known_benchmarks(repository: Path) -> None:
    saved = {path.stem for path in (repository / "docs" / "benchmarks").glob("*.json")}
    assert saved
    assert {name.removeprefix("native_") for name in saved} <= set(benchmark.BENCHMARKS)


@pytest.mark.parametrize("words", [[], ["--cpp-backend", "somewhere"]])
def test_options_are_passed_to_benchmarks_that_have_them(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    found: list[object] = []

    def fake(rounds: int, seconds: float, cpp_backend: Path | None) -> list[dict[str, object]]:
        found.extend((rounds, seconds, cpp_backend))
        return [{"set-up": "x", "ratio": 1.0}]

    monkeypatch.setitem(benchmark.BENCHMARKS, "serving", (fake, "serving"))
    run(monkeypatch, "serving", "--rounds", "1", *words)
    assert found == [1, 3.0, Path("somewhere") if words else None]


@pytest.mark.parametrize(("name", "saved"), [("serving", "native_serving"), ("peers", "peers"), ("one", "one")])
def test_results_with_the_native_seat_are_saved_apart(
    kept: list[str], monkeypatch: pytest.MonkeyPatch, name: str, saved: str
) -> None:
    """Not those of the peers, where graphkiln has no native seat, nor of benchmarks without the C++ backend."""

    def with_backend(rounds: int, seconds: float, cpp_backend: Path | None) -> list[dict[str, object]]:
        return [{"rounds": rounds, "seconds": seconds, "backend": cpp_backend}]

    def without(rounds: int, seconds: float) -> list[dict[str, object]]:
        return [{"rounds": rounds, "seconds": seconds}]

    monkeypatch.setattr(benchmark, "BENCHMARKS", {name: (without if name == "one" else with_backend, name)})
    run(monkeypatch, "all", "--cpp-backend", "somewhere")
    assert kept == [saved, "tables"]
