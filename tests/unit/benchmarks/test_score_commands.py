"""Whole commands of scoring: time, memory of all processes, ratios to both peers."""

from __future__ import annotations

import sys

import pytest
import score_commands
from score_commands import DAFT, FIRST, rows_of, run_whole
from score_speed import OURS, PEER

from graphkiln_backend.graph.errors import MeasurementError


def test_memory_of_all_processes_counts() -> None:
    hold = "import time; held = b'x' * 100_000_000; time.sleep(1.2)"
    both = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {hold!r}]); {hold}; child.wait()"
    whole = run_whole([sys.executable, "-c", both])
    assert whole.seconds > 1.2
    assert 190 < whole.peak_mb < 300


def test_a_command_that_fails_is_no_measurement() -> None:
    with pytest.raises(MeasurementError, match="exit status 3: nothing there"):
        run_whole([sys.executable, "-c", "import sys; print('nothing there'); sys.exit(3)"])


def test_commands_are_compared_with_both_peers_round_by_round() -> None:
    def wholes(*seconds: float, peak_mb: float = 100) -> list[dict[str, float]]:
        return [{"seconds": each, "peak_mb": peak_mb} for each in seconds]

    found = {
        FIRST: wholes(20, 20),
        OURS: wholes(10, 20, peak_mb=50),
        DAFT: wholes(12, 20),
        PEER: wholes(20, 60),
    }
    first, ours, daft, ray_data = rows_of("fp32 320", found)
    assert (first["row"], first["s"]) == ("fp32 320, graphkiln score, first run of a model", 20)
    assert (ours["ratio"], ours["spread"], ours["to Ray Data"], ours["memory ratio"]) == (1.1, 0.091, 2.5, 0.5)
    assert (daft["ratio"], daft["memory ratio"], ray_data["to Ray Data"]) == (1, 1, 1)
    del found[PEER]
    assert next(rows_of("fp32 5000", found))["to Ray Data"] == "-"


def test_an_unknown_part_is_refused_with_the_known_ones() -> None:
    with pytest.raises(SystemExit, match="no part int4; there are fp32 320, fp32 5000, int8 320, int8 5000"):
        score_commands.benchmark_commands(2, 3.0, "int4")
