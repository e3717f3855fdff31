"""`graphkiln score` with real Ray, the digits model and a folder of images."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pyarrow import parquet
from running import free_ports, run_command

from graphkiln.scoring.metrics import COUNTERS, GAUGES, UNIT_SECONDS
from graphkiln.scoring.run_state import Progress
from graphkiln_backend.graph.decoding import decode

pytestmark = pytest.mark.slow

LABELS = ("three", "four", "seven", "eight", "nine")
COPIES = 8


@pytest.fixture
def folder(repository: Path, tmp_path: Path) -> Path:
    """A folder with `photos` (forty digits and a file that is no image) and the model store of the repository."""
    (tmp_path / "photos").mkdir()
    for label in LABELS:
        for copy in range(COPIES):
            shutil.copy2(repository / "docs" / "digits" / f"{label}.png", tmp_path / "photos" / f"{label}-{copy}.png")
    (tmp_path / "photos" / "broken.png").write_bytes(b"no image")
    (tmp_path / "model_repository").symlink_to(repository / "model_repository")
    return tmp_path


def score(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    given = ("photos", "--model", "model_repository/digits:1", "--out", "answers", "--rows-per-unit", "10")
    return run_command("score", *given, *words, cwd=folder)


def read_answers(folder: Path) -> dict[str, dict[str, Any]]:
    return {row["id"]: row for row in parquet.read_table(folder / "answers").to_pylist()}


def test_folder_is_scored_resumed_verified_damaged_and_repaired(folder: Path) -> None:
    dry = score(folder, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "41 rows in" in dry.stdout
    assert not (folder / "answers").exists()

    first = score(folder, "--progress", "json")
    assert first.returncode == 0, first.stderr
    lines = [decode(Progress, json.loads(line)) for line in first.stdout.splitlines()]
    last = lines[-1]
    assert (last.event, last.rows, last.rows_done, last.errors) == ("finished", 41, 41, 1)
    assert lines[0].event == "planned"
    answers = read_answers(folder)
    assert len(answers) == 41
    assert [name for name, row in answers.items() if row["error"]] == ["broken.png"]
    assert all(row["labels"][0] == name.partition("-")[0] for name, row in answers.items() if not row["error"])
    assert {row["version"] for row in answers.values()} == {1}

    (error,) = parquet.read_table(folder / "answers" / "_errors.parquet").to_pylist()
    assert error["id"] == "broken.png"

    again = score(folder, "--progress", "json")
    assert again.returncode == 0, again.stderr
    last = decode(Progress, json.loads(again.stdout.splitlines()[-1]))
    assert (last.units_before, last.units_done) == (last.units, 0)

    assert "is whole: 41 rows = 40 scored + 1 errors" in run_command("score", "--verify", "answers", cwd=folder).stdout
    victim = next(path for path in (folder / "answers").glob("*.parquet") if not path.name.startswith("_"))
    victim.unlink()
    broken = run_command("score", "--verify", "answers", cwd=folder)
    assert broken.returncode == 1
    assert victim.stem in broken.stdout
    mended = score(folder)
    assert mended.returncode == 0, mended.stderr
    assert re.search(r"self-test", mended.stdout)
    assert victim.exists()
    assert read_answers(folder) == answers

    note = json.loads((folder / "answers" / "_run.json").read_text())
    assert [run["outcome"] for run in (note, *note["earlier"])] == ["finished"] * 3
    assert note["figures"]["units_done"] == 1
    assert note["workers"][0]["self_test"]["verdict"].endswith("PASS")


def test_destination_of_another_input_or_configuration_is_refused(folder: Path) -> None:
    assert score(folder).returncode == 0
    other = score(folder, "--top-k", "2")
    assert other.returncode == 2
    assert "another" in other.stderr
    shutil.copy2(folder / "photos" / "nine-0.png", folder / "photos" / "new.png")
    changed = score(folder)
    assert changed.returncode == 2
    assert "--replace" in changed.stderr
    assert len(read_answers(folder)) == 41
    replaced = score(folder, "--replace")
    assert replaced.returncode == 0, replaced.stderr
    assert read_answers(folder)["new.png"]["labels"][0] == "nine"
    assert run_command("score", "--verify", "answers", cwd=folder).returncode == 0


def test_commands_and_programs_of_the_manual(folder: Path, repository: Path) -> None:
    manual = (repository / "docs" / "scoring.md").read_text()
    commands, *_ = re.findall(r"^```bash\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    for line in commands.splitlines():
        words = line.partition("  #")[0].split()
        finished = run_command(*words[1:], cwd=folder)
        assert finished.returncode == 0, (line, finished.stderr)
    programs = re.findall(r"^```python\n(.*?)^```", manual, re.MULTILINE | re.DOTALL)
    said = []
    for program in programs[:2]:  # those of Iceberg need its commands: tests/documentation
        done = subprocess.run(
            [sys.executable, "-c", program], cwd=folder, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == "40 scored, 1 errors\nwhole\n"
    assert "41 ['id', 'indices', 'labels', 'scores', 'model', 'version', 'error']" in said[1]


_SCRAPED = """
import sys, time, urllib.request
import ray
from graphkiln.scoring import score

port = int(sys.argv[1])
ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False, _metrics_export_port=port,
         _temp_dir=sys.argv[2])
try:
    score("photos", model="model_repository/digits", out="answers", rows_per_unit=10)
    wanted, text = sys.argv[3].split(","), ""
    for _ in range(60):
        time.sleep(1)
        try:
            text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode()
        except OSError:
            continue
        if all(name in text for name in wanted):
            break
    print(*[line for line in text.splitlines() if "graphkiln" in line], sep="\\n")
finally:
    ray.shutdown()
"""


def test_metrics_at_rays_endpoint(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Metrics of every run: nothing is retried, lost or replaced here."""
    rare = {"graphkiln_score_workers_ended_total", "graphkiln_score_nodes_lost_total"}
    names = {*COUNTERS, *GAUGES, f"{UNIT_SECONDS}_count"} - rare
    temporary = tmp_path_factory.mktemp("r")
    done = subprocess.run(
        [sys.executable, "-c", _SCRAPED, str(free_ports(1)[0]), str(temporary), ",".join(f"ray_{n}" for n in names)],
        cwd=folder, capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert {name for name in names if f"ray_{name}{{" not in done.stdout} == set()
    scored = re.findall(
        r"^ray_graphkiln_score_rows_total\{.*outcome=\"scored\".*\} ([\d.]+)$", done.stdout, re.MULTILINE
    )
    assert sum(map(float, scored)) == 40
    (left,) = re.findall(r"^ray_graphkiln_score_rows_left\{.*\} ([\d.]+)$", done.stdout, re.MULTILINE)
    assert float(left) == 0
