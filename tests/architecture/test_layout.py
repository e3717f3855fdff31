"""The rules of the tree that no linter knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOTS = ("backend", "client", "converters", "scripts")


@pytest.mark.parametrize("root", ROOTS)
def test_graphkiln_is_a_namespace_over_four_roots(repository: Path, root: Path) -> None:
    assert (repository / root / "graphkiln").is_dir()
    assert not (repository / root / "graphkiln" / "__init__.py").exists(), "it would hide the other roots"
    loose = [path.name for path in (repository / root).glob("*.py")]
    assert not loose, "a loose module in a root becomes a top-level module of the editable install"


def test_every_package_is_typed(repository: Path) -> None:
    packages = {path.parent for root in ROOTS for path in (repository / root / "graphkiln").glob("*/__init__.py")}
    assert len(packages) >= 10
    assert [package for package in packages if not (package / "py.typed").exists()] == []


def test_ci_runs_the_three_scripts_and_nothing_else(repository: Path) -> None:
    lines = (repository / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["scripts/check", "scripts/test", "scripts/test-image"]


def test_a_server_start_does_not_pay_for_what_most_starts_do_not_need() -> None:
    heavy = {"torch", "onnx_ir", "onnxscript", "sympy", "openvino", "rich", "pydantic", "lark"}
    modules = "graphkiln.lowering.deployment, graphkiln.lowering.adoption, graphkiln.repository.overlay"
    program = f"import sys, {modules}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not heavy & set(loaded)
