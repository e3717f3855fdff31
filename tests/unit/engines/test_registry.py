"""Engines are found by entry point."""

from __future__ import annotations

import pytest

from graphkiln_backend.engines.onnxruntime import OnnxRuntimeEngine
from graphkiln_backend.engines.registry import engine_names, load_engine
from graphkiln_backend.graph.errors import EngineUnavailable


def test_the_built_in_engines_are_entry_points() -> None:
    assert "onnxruntime" in engine_names()
    assert isinstance(load_engine("onnxruntime"), OnnxRuntimeEngine)


def test_an_unknown_engine_names_the_nearest() -> None:
    with pytest.raises(EngineUnavailable, match="did you mean 'onnxruntime'"):
        load_engine("onnxrutime")
