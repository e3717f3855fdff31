"""Model Analyzer beside the searches: what it is told, what is read of it, and what is said where it is not there."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path

import pytest
import tune_analyzer
from digits_subject import digits_subject
from tune_analyzer import ANALYZED, Analyzed, analyzed, chosen, read_results, settings, write_program

from graphkiln.tuning.subject import Subject

KEYS = ("engine", "instances", "max_batch_size", "threads")
RESULTS = """Model,Batch,Concurrency,Model Config Path,Instance Group,Max Batch Size,Satisfies Constraints,\
Throughput (infer/sec),p99 Latency (ms)
digits,1,2,digits_config_default,1:CPU,32,Yes,90.5,20.1
digits,1,8,digits_config_3,2:CPU,4,Yes,120.0,48.9
digits,1,16,digits_config_3,2:CPU,4,No,150.0,70.2
"""
ANALYZER = """#!/bin/sh
set -e
mkdir -p output results
cp -r {model} output/digits_config_3
sed -i 's/max_batch_size: 32/max_batch_size: 4/' output/digits_config_3/config.pbtxt
cat > results/metrics-model-inference.csv <<'END'
{results}END
"""


@pytest.fixture(scope="module")
def subject(repository: Path) -> Subject:
    return digits_subject(repository)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, **programs: str) -> None:
    """Puts programs on PATH, before all others."""
    for name, text in programs.items():
        program = folder / name.replace("__", "-")
        program.write_text(text)
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


def test_the_fastest_within_the_target_is_its_choice() -> None:
    rows = read_results(RESULTS)
    assert [row.per_second for row in rows] == [90.5, 120.0, 150.0]
    assert chosen(rows) == Analyzed(name="digits_config_3", per_second=120.0, is_within=True)
    assert chosen(rows[2:]) is None


def test_it_is_told_to_search_quickly_on_a_cpu(subject: Subject, tmp_path: Path) -> None:
    told = settings(tmp_path, tmp_path / "tritonserver", subject, 0.05)
    assert json.loads(json.dumps(told)) == told
    assert told["run_config_search_mode"] == "quick"
    assert told["gpus"] == []
    assert told["profile_models"] == {"digits": {"cpu_only": True}}
    assert told["constraints"] == {"perf_latency_p99": {"max": 50}}
    assert (Path(told["model_repository"]) / "digits" / "config.pbtxt").exists()


def test_the_program_hands_its_flags_on(tmp_path: Path) -> None:
    program = write_program(tmp_path / "triton server")
    assert program.stat().st_mode & stat.S_IXUSR
    assert program.read_text().splitlines()[1].endswith('serve --admin-key-file=off --drain=1 --replay-interval=0 "$@"')


def test_without_it_the_row_says_so(subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert analyzed(subject, KEYS, 0.05).note == "not measured: model-analyzer is not on PATH"
    (tmp_path / "model-analyzer").symlink_to("/bin/true")
    assert analyzed(subject, KEYS, 0.05).note == "not measured: perf_analyzer is not on PATH"


def test_what_it_chose_is_a_candidate(subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    analyzer = ANALYZER.format(model=subject.folder, results=RESULTS)
    install(tmp_path, monkeypatch, model__analyzer=analyzer, perf_analyzer="#!/bin/sh\n")
    found = analyzed(subject, KEYS, 0.05)
    assert found.note == ""
    assert (found.name, found.measurements) == (ANALYZED, 3)
    assert found.candidate is not None
    assert found.candidate["max_batch_size"] == 4
    assert found.candidate["engine"] == "onnxruntime"
    assert {key for key, _ in found.candidate.items} == set(KEYS)


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("#!/bin/sh\necho first\necho no server\nexit 3\n", "not measured: it ended with code 3: no server"),
        ("#!/bin/sh\nexec sleep 600\n", "not measured: it did not end within 0.1 s"),
        ("#!/bin/sh\n", "nothing that it measured was within the target"),
    ],
)
def test_what_does_not_end_well_says_why(
    subject: Subject, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, note: str
) -> None:
    assert shutil.which("sleep")
    install(tmp_path, monkeypatch, model__analyzer=text, perf_analyzer="#!/bin/sh\n")
    monkeypatch.setattr(tune_analyzer, "_MOST_S", 0.1 if "sleep" in text else 60.0)
    found = analyzed(subject, KEYS, 0.05)
    assert found.candidate is None
    assert found.note == note
