"""The rules of the tree that no linter knows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import graphkiln

PACKAGES = (
    "backend/graphkiln_backend",
    "client/graphkiln_client",
    "converters/graphkiln_converters",
    "scripts/graphkiln",
)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_root_holds_one_typed_package_and_no_loose_module(repository: Path, package: str) -> None:
    folder = repository / package
    assert (folder / "__init__.py").is_file()
    assert (folder / "py.typed").is_file()
    loose = [path.name for path in folder.parent.glob("*.py")]
    assert not loose, "a loose module in a root becomes a top-level module of the editable install"


def test_the_public_names_are_all_there() -> None:
    assert {name for name in graphkiln.__all__ if not hasattr(graphkiln, name)} == set()
    assert dir(graphkiln) == graphkiln.__all__
    with pytest.raises(AttributeError, match="nothing"):
        graphkiln.nothing  # noqa: B018


def test_importing_the_public_face_imports_nothing_else() -> None:
    program = "import sys, graphkiln; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "typer", "graphkiln_backend", "graphkiln_client", "graphkiln_converters"} & set(loaded)


def test_ci_runs_the_scripts_and_nothing_else(repository: Path) -> None:
    lines = (repository / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == [
        "scripts/check",
        "scripts/test",
        'scripts/test -m "wide and not slow"',
        "scripts/test -m alone -n 0",
        "scripts/test-image",
    ]


def test_a_server_start_does_not_pay_for_what_most_starts_do_not_need() -> None:
    heavy = {"torch", "onnx_ir", "onnxscript", "sympy", "openvino", "rich", "pydantic", "lark"}
    modules = ("lowering.deployment", "lowering.importing", "repository.overlay")
    program = f"import sys, {', '.join(f'graphkiln_backend.{each}' for each in modules)}; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not heavy & set(loaded)


def test_committed_graphs_say_nothing_of_the_machine_that_exported_them(repository: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "*.onnx"], cwd=repository, capture_output=True, text=True, check=True)
    graphs = tracked.stdout.split()
    assert "model_repository/digits/1/model.onnx" in graphs
    traces = (b"stack_trace", b'File "/', b"site-packages")
    told = {name for name in graphs if any(trace in (repository / name).read_bytes() for trace in traces)}
    assert not told
