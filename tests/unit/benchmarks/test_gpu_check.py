"""`scripts/gpu-check` without a GPU: options, installation, and standard output."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDERS = ("support", "integration", "conversion")
# Modules of the extras that the script installs.
OF_EXTRAS = {"numpy", "PIL", "psutil", "onnx", "onnx_ir", "onnxruntime", "torch", "rich", "typer"}
# Replacement for every Python; records its arguments.
PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in
    *"-m venv"*) mkdir -p .venv-gpu/bin && cp "$0" .venv-gpu/bin/python ;;
    *"-m pip install --quiet --editable"*) [ ! -e broken ] ;;
    *pytest*) echo "a line of pytest" ;;
    *gpu_check.py*) echo "figures" ;;
esac
"""


class Machine:
    """A folder with the script, and programs in place of real ones."""

    def __init__(self, folder: Path, script: Path) -> None:
        self.folder = folder
        for name in ("scripts", "bin"):
            (folder / name).mkdir()
        shutil.copy(script, folder / "scripts" / "gpu-check")
        self.add("nvidia-smi", "#!/bin/sh\n")
        self.add("python3", PYTHON)

    def add(self, name: str, text: str) -> Path:
        program = self.folder / "bin" / name
        program.write_text(text)
        program.chmod(0o755)
        return program

    def run(self, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
        path = f"{self.folder / 'bin'}:{os.environ['PATH']}"
        command = [str(self.folder / "scripts" / "gpu-check"), *words]
        environment = {**os.environ, "PATH": path, **variables}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)

    def calls(self) -> list[str]:
        """Arguments of Python since the last call."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        file.unlink(missing_ok=True)
        return lines


@pytest.fixture
def machine(tmp_path: Path, repository: Path) -> Machine:
    return Machine(tmp_path, repository / "scripts" / "gpu-check")


def test_installs_once_tests_and_measures(machine: Machine) -> None:
    done = machine.run("--rounds", "3", "--json")
    assert (done.returncode, done.stdout) == (0, "figures\n")  # the output of pytest is not JSON
    assert "a line of pytest" in done.stderr
    calls = machine.calls()
    assert calls[0].startswith("-m venv")
    assert calls[-1] == "scripts/benchmarks/gpu_check.py --rounds 3 --json"
    machine.run("--skip-tests")
    assert machine.calls() == ["scripts/benchmarks/gpu_check.py"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--jsn"], "there is no option --jsn"),
        (["--rounds"], "--rounds takes a number"),
        (["--rounds", "0"], "--rounds takes a number"),
    ],
)
def test_mistakes_are_reported_before_the_installation(machine: Machine, words: list[str], message: str) -> None:
    done = machine.run(*words)
    assert done.returncode == 2
    assert message in done.stderr
    assert machine.calls() == []


def test_a_missing_gpu_and_help(machine: Machine) -> None:
    machine.add("nvidia-smi", "#!/bin/sh\nexit 9\n")
    done = machine.run()
    assert done.returncode == 2
    assert "nvidia-smi finds no GPU" in done.stderr
    shown = machine.run("--help")
    assert shown.returncode == 0
    assert "scripts/gpu-check [--rounds N] [--json] [--skip-tests]" in shown.stdout
    assert "set -euo" not in shown.stdout


def test_all_imports_of_its_tests_are_installed(repository: Path) -> None:
    """The script has its own environment, without the modules of the developers' one."""
    line = next(
        line for line in (repository / "scripts" / "gpu-check").read_text().splitlines() if "--editable" in line
    )
    files = [repository / "tests" / "conftest.py", *(repository / "tests" / "gpu").glob("*.py")]
    assert imported(files, [repository / "tests" / name for name in FOLDERS]) - OF_EXTRAS <= set(line.split())


def imported(files: list[Path], folders: list[Path]) -> set[str]:
    """Modules of other projects that files and our modules that they use import at the top."""
    found: set[str] = set()
    seen: set[Path] = set()
    while files:
        file = files.pop()
        seen.add(file)
        for node in ast.parse(file.read_text()).body:
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            for name in {each.partition(".")[0] for each in names} - sys.stdlib_module_names:
                if ours := [path for folder in folders if (path := folder / f"{name}.py").exists()]:
                    files += [path for path in ours if path not in seen]
                elif not name.startswith("graphkiln"):
                    found.add(name)
    return found
