"""The extra `[score]`: an error names it if it is missing, and nothing of it is imported early."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from graphkiln.scoring import check_extra
from graphkiln_backend.graph.errors import EngineUnavailable
from graphkiln_backend.scoring.iceberg import ResultTable, Snapshot, TableName


def test_missing_packages_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name in ("ray", "pyarrow") else found(name)

    monkeypatch.setattr("graphkiln_backend.graph.modules.find_spec", find)
    with pytest.raises(EngineUnavailable) as caught:
        check_extra()
    assert str(caught.value) == "scoring needs ray, pyarrow (pip install 'graphkiln[score]')"


@pytest.mark.parametrize("opened", [Snapshot, ResultTable.load])
def test_a_table_of_iceberg_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, opened: Callable[[TableName], Any]
) -> None:
    monkeypatch.setitem(sys.modules, "pyiceberg", None)  # as if it was not installed: its import fails
    monkeypatch.setattr("graphkiln_backend.graph.modules.find_spec", lambda _: None)
    with pytest.raises(EngineUnavailable, match=r"Iceberg needs pyiceberg.*\[iceberg\]"):
        opened(TableName.parse("iceberg:lake/shop.photos"))


def test_package_and_command_import_no_heavy_package() -> None:
    program = (
        "import sys, graphkiln.scoring, graphkiln.cli.main; graphkiln.cli.main.app; "
        "print(*sorted({'ray', 'pyarrow', 'onnxruntime', 'rich.table', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
