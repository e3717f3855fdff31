"""What a node is told that cannot take part."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

from graphkiln_backend.scoring import preflight
from graphkiln_backend.scoring.preflight import examine_node

HERE = version("graphkiln")


def test_a_node_like_this_one_takes_part(tmp_path: Path) -> None:
    assert examine_node(HERE, str(tmp_path)) == ""
    assert examine_node(HERE, "") == ""


def test_another_version_is_told_with_what_to_install() -> None:
    assert "install 'graphkiln[score]==9.9'" in examine_node("9.9", "")


def test_a_model_that_is_not_there_is_told(tmp_path: Path) -> None:
    assert f"it cannot read {tmp_path / 'none'}: mount" in examine_node(HERE, str(tmp_path / "none"))


def test_it_runs_where_graphkiln_is_not_installed() -> None:
    source = Path(preflight.__file__).read_text()
    program = f"{source}\nprint(examine_node('1.0', ''))"
    told = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True).stdout
    assert "it has no graphkiln in its Python environment" in told
