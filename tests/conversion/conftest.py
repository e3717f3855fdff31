"""Converting in tests: into a temporary store, with errors raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from converting import MODULES, Convert

from graphkiln_converters.convert import convert
from graphkiln_converters.recipe_file import read_recipe


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def run(store: Path) -> Convert:
    def run(source: str, name: str = "m", **options: Any) -> Path:
        recipe = read_recipe(None, {"source": source, "name": name, "model_store": str(store), **options}, [])
        return convert(recipe, command="test")

    return run


@pytest.fixture
def small() -> str:
    return f"python:{MODULES}:shaped"
