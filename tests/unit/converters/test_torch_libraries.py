"""Importing torchvision with and without its compiled part."""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from graphkiln_converters import torch_libraries
from graphkiln_converters.torch_libraries import import_torchvision


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Exception], ModuleType]:
    """Makes the first import of torchvision fail; what a later one returns."""
    stub = ModuleType("torchvision")
    original = builtins.__import__
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)

    def fail(error: Exception) -> ModuleType:
        errors = [error]

        def imported(name: str, *arguments: Any, **keywords: Any) -> Any:
            if name == "torchvision":
                if errors:
                    raise errors.pop()
                return stub
            return original(name, *arguments, **keywords)

        monkeypatch.setattr(builtins, "__import__", imported)
        return stub

    return fail


def test_missing_operators_are_declared(
    importing: Callable[[Exception], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    declared: list[str] = []

    class Library:
        def __init__(self, name: str, kind: str) -> None:
            declared.append(f"{name} {kind}")

        def define(self, schema: str) -> None:
            declared.append(schema.split("(", maxsplit=1)[0])

    monkeypatch.setattr(torch.library, "Library", Library)
    monkeypatch.setattr(torch_libraries, "_DECLARED", [])
    stub = importing(RuntimeError("operator torchvision::nms does not exist"))
    assert import_torchvision() is stub
    assert declared == ["torchvision DEF", "nms", "qnms"]
    assert len(torch_libraries._DECLARED) == 1, "declarations end with the object"


@pytest.mark.parametrize("error", [RuntimeError("CUDA driver"), ImportError("No module named 'torchvision'")])
def test_other_errors_are_not_hidden(importing: Callable[[Exception], ModuleType], error: Exception) -> None:
    importing(error)
    with pytest.raises(type(error), match=str(error)):
        import_torchvision()
