"""What Triton's Model Analyzer chooses in its quick mode, on a CPU and without Docker.

It runs in its local mode, where it starts a server for each configuration: ours, by a program that takes tritonserver's
flags. It varies instances, the largest batch and the number of callers; engine, precision and threads stay as they are,
and no answer is compared.

Source: Triton Model Analyzer, docs/config.md and docs/config_search.md.
"""

from __future__ import annotations

import csv
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from generators import PERF_ANALYZER
from measurement import show_progress
from tune_ways import Choice

from graphkiln.story.server import ending_with_us, free_ports
from graphkiln.tuning.candidate import Candidate, default_values
from graphkiln.tuning.subject import Subject, read_subject, vanishing_cache
from graphkiln_backend.repository.config import read_config, write_config
from graphkiln_backend.repository.version import CONFIG_FILE

MODEL_ANALYZER = "model-analyzer"
ANALYZED = "Model Analyzer, quick search"
_MOST_S = 600.0  # it keeps no more than this, whatever it has found by then
_MOST_BATCH, _MOST_CALLERS = 8, 32
_WINDOW_MS = 2000
_NAME, _SATISFIES = "Model Config Path", "Satisfies Constraints"
_THROUGHPUT = "Throughput (infer/sec)"


@dataclass(frozen=True, kw_only=True, slots=True)
class Analyzed:
    """A configuration that it measured.

    Attributes:
        name: Of its folder in the repository that it writes.
        per_second: Responses per second.
        is_within: Whether its p99 was within the target.
    """

    name: str
    per_second: float
    is_within: bool


def analyzed(subject: Subject, keys: Iterable[str], p99_s: float) -> Choice:
    """What it chooses; nothing, and why, where it is not installed or does not come to an end.

    Args:
        subject: The model.
        keys: Of the space, for the candidate that its configuration is.
        p99_s: The target.
    """
    for program in (MODEL_ANALYZER, PERF_ANALYZER):
        if not shutil.which(program):
            return Choice(name=ANALYZED, candidate=None, note=f"not measured: {program} is not on PATH")
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        return _analyze(Path(folder), subject, keys, p99_s)


def _analyze(folder: Path, subject: Subject, keys: Iterable[str], p99_s: float) -> Choice:
    program = write_program(folder / "tritonserver")
    config = folder / "analyzer.yaml"
    config.write_text(json.dumps(settings(folder, program, subject, p99_s)))  # JSON is YAML
    show_progress(f"{ANALYZED}: up to {_MOST_S:g} s")
    begun_s = time.monotonic()
    reason = _run(folder, config)
    spent_s = time.monotonic() - begun_s
    rows = [row for path in folder.rglob("metrics-model-inference.csv") for row in read_results(path.read_text())]
    best = chosen(rows)
    return Choice(
        name=ANALYZED,
        candidate=candidate_of(folder / "output" / best.name / str(subject.version), keys) if best else None,
        spent_s=spent_s,
        measurements=len(rows),
        budget_s=_MOST_S,
        note=reason or ("" if best else "nothing that it measured was within the target"),
    )


def settings(folder: Path, program: Path, subject: Subject, p99_s: float) -> dict[str, Any]:
    """Its configuration.

    Args:
        folder: Where it writes.
        program: What it starts in the place of tritonserver.
        subject: The model.
        p99_s: The target.
    """
    http, grpc, metrics = free_ports(3)
    return {
        "model_repository": str(subject.folder.parent),
        "profile_models": {subject.name: {"cpu_only": True}},
        "run_config_search_mode": "quick",
        "run_config_search_max_instance_count": subject.cores,
        "run_config_search_max_model_batch_size": _MOST_BATCH,
        "run_config_search_max_concurrency": _MOST_CALLERS,
        "objectives": ["perf_throughput"],
        "constraints": {"perf_latency_p99": {"max": round(p99_s * 1e3)}},
        "gpus": [],
        "triton_launch_mode": "local",
        "triton_server_path": str(program),
        "triton_http_endpoint": f"localhost:{http}",
        "triton_grpc_endpoint": f"localhost:{grpc}",
        "triton_metrics_url": f"http://localhost:{metrics}/metrics",
        "triton_output_path": str(folder / "server.log"),
        "perf_analyzer_path": shutil.which(PERF_ANALYZER) or PERF_ANALYZER,
        "perf_analyzer_flags": {
            "measurement-mode": "time_windows", "measurement-interval": _WINDOW_MS, "stability-percentage": 999,
        },
        "output_model_repository_path": str(folder / "output"),
        "override_output_model_repository": True,
        "export_path": str(folder),
        "checkpoint_directory": str(folder / "checkpoints"),
    }  # fmt: skip


def write_program(path: Path) -> Path:
    """A program that serves with tritonserver's flags, open to whoever loads models, and that ends with its parent."""
    words = [*ending_with_us(), sys.executable, "-P", "-m", "graphkiln.cli", "serve"]
    flags = "--admin-key-file=off --drain=1 --replay-interval=0"
    path.write_text(f'#!/bin/sh\nexec {shlex.join(words)} {flags} "$@"\n')
    path.chmod(0o755)
    return path


def read_results(text: str) -> list[Analyzed]:
    """Reads its table of measurements.

    Args:
        text: As CSV.
    """
    rows = csv.DictReader(text.strip().splitlines())
    return [
        Analyzed(
            name=row[_NAME].strip(), per_second=float(row[_THROUGHPUT]), is_within=row[_SATISFIES].strip() == "Yes"
        )
        for row in rows
    ]


def chosen(rows: Sequence[Analyzed]) -> Analyzed | None:
    """The fastest whose p99 was within the target."""
    return max((row for row in rows if row.is_within), key=lambda row: row.per_second, default=None)


def candidate_of(version: Path, keys: Iterable[str]) -> Candidate:
    """What a configuration that it has written is as a candidate; its file gets the name of its folder, which it lacks.

    Args:
        version: Its version folder.
        keys: Of the space.
    """
    config = read_config(version.parent / CONFIG_FILE)
    config.name = version.parent.name
    write_config(config, version.parent / CONFIG_FILE)
    with vanishing_cache() as cache:
        values = default_values(read_subject(version, cache))
    return Candidate.of({key: values[key] for key in keys})


def _run(folder: Path, config: Path) -> str:
    """Why it did not end well; empty where it did."""
    command = [MODEL_ANALYZER, "profile", "--config-file", str(config)]
    log = folder / "analyzer.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*ending_with_us(), *command], cwd=folder, stdout=output, stderr=output, env=_environment(folder)
        )
        try:
            code = process.wait(_MOST_S)
        except subprocess.TimeoutExpired:
            return f"not measured: it did not end within {_MOST_S:g} s"
        finally:
            process.kill()  # its server ends with it
            process.wait()
    last = next((line.strip() for line in reversed(log.read_text().splitlines()) if line.strip()), "")
    return f"not measured: it ended with code {code}: {last[:200]}" if code else ""


def _environment(folder: Path) -> dict[str, str]:
    return {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "MPLBACKEND": "agg"}
