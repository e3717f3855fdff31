"""Without the extra, scoring says how to install it, and imports nothing."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

import graphkiln.scoring as extra
from graphkiln.scoring import check_extra
from graphkiln_backend.graph.errors import EngineUnavailable


def test_what_is_installed_is_enough() -> None:
    check_extra()


def test_what_is_missing_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find(name: str) -> Any:
        return None if name in ("ray", "pyarrow") else found(name)

    monkeypatch.setattr(extra, "find_spec", find)
    with pytest.raises(EngineUnavailable) as caught:
        check_extra()
    assert str(caught.value) == "scoring needs ray, pyarrow (pip install 'graphkiln[score]')"


def test_the_face_and_the_command_import_none_of_it() -> None:
    program = (
        "import sys, graphkiln.scoring, graphkiln.cli.main; graphkiln.cli.main.app; "
        "from graphkiln.scoring import score, verify; "
        "print(*sorted({'ray', 'pyarrow', 'onnxruntime', 'rich.table', 'fsspec'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
