"""Converting in tests: into a temporary store, with errors raised."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir
import pytest
from converting import MODULES, Convert

from graphkiln_converters.convert import convert
from graphkiln_converters.recipe_file import read_recipe
from graphkiln_converters.sources import pytorch


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(scope="session")
def exports() -> dict[str, onnx_ir.Model]:
    """Graphs of modules as PyTorch exported them, which takes seconds: what was asked for -> the graph."""
    return {}


@pytest.fixture
def _modules_are_exported_once(monkeypatch: pytest.MonkeyPatch, exports: dict[str, onnx_ir.Model]) -> None:
    """Most tests are about what becomes of the graph: another module, weight, size or name is exported anew."""
    original = pytorch.export_module

    def export(module: Any, arguments: Any, keywords: Any, **options: Any) -> onnx_ir.Model:
        if type(module).__name__ not in ("Small", "Overflowing", "Pair"):  # as their weights say, and nothing else
            return original(module, arguments, keywords, **options)
        weights = [(key, value.tolist()) for key, value in module.state_dict().items()]
        inputs = [(each.shape, each.dtype) for each in (*arguments, *keywords.values())]
        asked = repr((type(module).__name__, weights, inputs, sorted(keywords), options))
        if asked in exports:
            return exports[asked].clone()
        exported = original(module, arguments, keywords, **options)
        exports[asked] = exported.clone()
        return exported

    monkeypatch.setattr(pytorch, "export_module", export)


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Convert:
    """Convert with the same options once for all tests, which only read the version."""
    store, versions = tmp_path_factory.mktemp("versions"), dict[str, Path]()

    def once(source: str, **options: Any) -> Path:
        asked = repr((source, sorted(options.items())))
        if asked not in versions:
            name = f"m{len(versions)}"
            recipe = read_recipe(None, {"source": source, "name": name, "model_store": str(store), **options}, [])
            versions[asked] = convert(recipe, command="test")
        return versions[asked]

    return once


@pytest.fixture
def run(store: Path, _modules_are_exported_once: None) -> Convert:
    def run(source: str, name: str = "m", **options: Any) -> Path:
        recipe = read_recipe(None, {"source": source, "name": name, "model_store": str(store), **options}, [])
        return convert(recipe, command="test")

    return run


@pytest.fixture
def small() -> str:
    return f"python:{MODULES}:shaped"
