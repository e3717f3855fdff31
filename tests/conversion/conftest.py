"""Conversions in tests, into a temporary store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnx_ir
import pytest
import skops.io  # noqa: F401 - looks at all attributes of all modules: before those of transformers, which are lazy
from converting import MODULES, Convert

from graphkiln_converters.convert import convert
from graphkiln_converters.recipe_file import read_recipe
from graphkiln_converters.sources import pytorch


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture(scope="session")
def exports() -> dict[str, onnx_ir.Model]:
    """Exported graphs by module and options, because an export takes seconds."""
    return {}


@contextmanager
def exported_once(exports: dict[str, onnx_ir.Model]) -> Iterator[None]:
    """Export each module, weights, sizes and names only once."""
    original = pytorch.export_module

    def export(module: Any, arguments: Any, keywords: Any, **options: Any) -> onnx_ir.Model:
        if type(module).__name__ not in ("Small", "Overflowing", "Pair"):  # determined by their weights
            return original(module, arguments, keywords, **options)
        weights = [(key, value.tolist()) for key, value in module.state_dict().items()]
        inputs = [(each.shape, each.dtype) for each in (*arguments, *keywords.values())]
        asked = repr((type(module).__name__, weights, inputs, sorted(keywords), options))
        if asked not in exports:
            exports[asked] = original(module, arguments, keywords, **options)
        return exports[asked].clone()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pytorch, "export_module", export)
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, exports: dict[str, onnx_ir.Model]) -> Convert:
    """Convert with the same options once for all tests, which only read the version."""
    store, versions = tmp_path_factory.mktemp("versions"), dict[str, Path]()

    def once(source: str, **options: Any) -> Path:
        asked = repr((source, sorted(options.items())))
        if asked not in versions:
            name = f"m{len(versions)}"
            recipe = read_recipe(None, {"source": source, "name": name, "model_store": str(store), **options}, [])
            with exported_once(exports):
                versions[asked] = convert(recipe, command="test")
        return versions[asked]

    return once


@pytest.fixture
def run(store: Path, exports: dict[str, onnx_ir.Model]) -> Convert:
    def run(source: str, name: str = "m", **options: Any) -> Path:
        recipe = read_recipe(None, {"source": source, "name": name, "model_store": str(store), **options}, [])
        with exported_once(exports):
            return convert(recipe, command="test")

    return run


@pytest.fixture
def small() -> str:
    return f"python:{MODULES}:shaped"
