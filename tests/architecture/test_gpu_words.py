"""Features that were never run on a GPU say so, until `docs/benchmarks/gpu.json` shows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOTS = ("backend", "client", "converters", "scripts")
OF_GPUS = re.compile(r"CUDAExecutionProvider|TensorrtExecutionProvider|nvmlInit|\"nvidia-smi\"|io_binding\(|nccl")
WORDS = "not yet run on"
PAGES = (
    "README.md",
    "docs/how-to/engines.md",
    "docs/parallel.md",
    "docs/reference/cli.md",
    "docs/reference/settings.md",
)


@pytest.fixture
def has_run(repository: Path) -> bool:
    return (repository / "docs" / "benchmarks" / "gpu.json").exists()


def test_every_module_that_reaches_for_a_gpu_says_whether_it_was_run_there(repository: Path, has_run: bool) -> None:
    files = [path for root in ROOTS for path in (repository / root).rglob("*.py") if OF_GPUS.search(path.read_text())]
    assert len(files) > 5
    says = {path: WORDS in " ".join(path.read_text().replace("#", " ").split()).lower() for path in files}
    assert [str(path.relative_to(repository)) for path, said in says.items() if said is has_run] == []


@pytest.mark.parametrize("page", PAGES)
def test_so_does_every_page_that_offers_one(repository: Path, has_run: bool, page: str) -> None:
    text = " ".join((repository / page).read_text().split())
    found = re.search(r"not yet run\b", text)
    assert bool(found) is not has_run
