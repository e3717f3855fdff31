"""The sizes that keep the tree readable, and one test module for each module with logic."""

from __future__ import annotations

import ast
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOTS = ("backend", "client", "converters", "scripts")
REPOSITORY = Path(__file__).resolve().parents[2]
COMMANDS = "scripts/graphkiln/cli"
"""A typer command is its list of options: each parameter is one, so neither its length nor their number says much."""
TESTED_TOGETHER = {
    "graphkiln_client/async_client.py": "client/test_client.py",
    "graphkiln_client/async_model.py": "client/test_client.py",
    "graphkiln_client/model.py": "client/test_client.py",
    "graphkiln_client/transports/grpc_async.py": "client/transports/test_grpc.py",
    "graphkiln_client/transports/grpc_blocking.py": "client/transports/test_grpc.py",
    "graphkiln_backend/passes/batch_following.py": "passes/test_batch.py",
    "graphkiln_backend/passes/batch_rules_products.py": "passes/test_batch_rules.py",
    "graphkiln_backend/passes/batch_rules_shapes.py": "passes/test_batch_rules.py",
    "graphkiln_backend/repository/row_rules.py": "repository/test_row_mixing.py",
    "graphkiln_backend/passes/casts.py": "passes/test_precision.py",
}
"""Modules that do one thing in two ways, or as two halves, and pass the same tests: module -> its tests."""
TESTED_BY_RUNNING = (
    "scripts/architecture",
    "scripts/benchmarks",
    "scripts/conforming",
    "scripts/documenting",
    "scripts/releasing",
    "scripts/rolling",
    "scripts/soaking",
)
"""Programs, not modules: `scripts/check`, `scripts/benchmark`, `scripts/conformance`, `scripts/docs` and
`scripts/soak` run them. What they share, and what judges, has tests all the same."""


@dataclass(frozen=True)
class Function:
    place: str
    lines: int
    parameters: int
    is_command: bool


def sources() -> list[Path]:
    return [path for root in ROOTS for path in sorted((REPOSITORY / root).rglob("*.py"))]


@cache
def functions() -> list[Function]:
    found = []
    for path in sources():
        name = str(path.relative_to(REPOSITORY))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append(_function(node, name))
    return found


def _function(node: ast.FunctionDef | ast.AsyncFunctionDef, path: str) -> Function:
    arguments = node.args
    names = [each.arg for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    public = not node.name.startswith("_")
    return Function(
        place=f"{path}:{node.lineno} {node.name}",
        lines=(node.end_lineno or node.lineno) - node.lineno + 1,
        parameters=len([name for name in names if name not in ("self", "cls")]),
        is_command=path.startswith(COMMANDS)
        and public
        and any("Annotated" in ast.unparse(each) for each in node.args.args),
    )


def lines_of(paths: list[Path]) -> int:
    return sum(len(path.read_text().splitlines()) for path in paths)


def test_functions_are_short() -> None:
    lengths = sorted(each.lines for each in functions())
    assert statistics.median(lengths) <= 6
    assert lengths[int(0.95 * len(lengths))] <= 28


def test_no_function_is_long() -> None:
    assert [each for each in functions() if each.lines > 60 and not each.is_command] == []


def test_no_function_has_many_parameters() -> None:
    assert [each for each in functions() if each.parameters > 8 and not each.is_command] == []


def test_no_module_is_long() -> None:
    lengths = {str(path.relative_to(REPOSITORY)): lines_of([path]) for path in sources()}
    assert {path: lines for path, lines in lengths.items() if lines > 300} == {}


def test_there_is_nearly_a_line_of_tests_for_each_line_of_source() -> None:
    assert lines_of(sorted((REPOSITORY / "tests").rglob("*.py"))) >= 0.9 * lines_of(sources())


def has_logic(path: Path) -> bool:
    """Whether a module does anything: a function with more than a docstring and one expression."""
    nodes = ast.walk(ast.parse(path.read_text()))
    bodies = [node.body for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return any(len([statement for statement in body if not _is_docstring(statement)]) > 1 for body in bodies)


def _is_docstring(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def unit_test_of(path: Path) -> Path:
    """`backend/graphkiln_backend/graph/cores.py` -> `tests/unit/graph/test_cores.py`, and the like."""
    root, _, *folders, name = path.relative_to(REPOSITORY).parts
    together = TESTED_TOGETHER.get("/".join(path.relative_to(REPOSITORY / root).parts))
    if together:
        return REPOSITORY / "tests" / "unit" / together
    room = {"client": ["client"], "converters": ["converters"]}.get(root, [])
    return REPOSITORY.joinpath("tests", "unit", *room, *folders, f"test_{name}")


MODULES = [
    path
    for path in sources()
    if not path.name.startswith("__") and not str(path.relative_to(REPOSITORY)).startswith(TESTED_BY_RUNNING)
]


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(REPOSITORY))) for path in MODULES])
def test_a_module_with_logic_has_a_test_of_its_own(path: Path) -> None:
    if has_logic(path):
        assert unit_test_of(path).is_file()
