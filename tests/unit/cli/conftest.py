"""Run the command in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnxruntime
import pytest
from commands import BreakOutputs, FakeClient, Finished, RunVerb

from graphkiln.cli.connection import ConnectionOptions
from graphkiln.cli.main import main
from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[RunVerb]:
    """Run `graphkiln WORDS` with 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("GRAPHKILN_URL", raising=False)
    logger = logging.getLogger("graphkiln")
    level, handlers = logger.level, logger.handlers

    def run_verb(*words: object) -> Finished:
        monkeypatch.setattr(sys, "argv", ["graphkiln", *map(str, words)])
        code: Any = 0
        try:
            main()
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return Finished(code or 0, captured.out, captured.err)

    yield run_verb
    logger.level, logger.handlers = level, handlers


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> FakeClient:
    """A fake client for all verbs."""
    fake = FakeClient()

    def connect(options: ConnectionOptions) -> FakeClient:
        fake.connected.append(options)
        return fake

    monkeypatch.setattr(ConnectionOptions, "connect", connect)
    return fake


@pytest.fixture
def break_outputs(monkeypatch: pytest.MonkeyPatch) -> BreakOutputs:
    """Make outputs of ONNX Runtime wrong by a condition on the number of rows, and on its own rewrites of the graph."""

    def break_where(is_wrong: Callable[[int, bool], bool]) -> None:
        run = OnnxRuntimeSession.run

        def wrong(self: OnnxRuntimeSession, feeds: Any, outputs: Any = None) -> Any:
            off = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
            rewrites = self._options.graph_optimization_level != off
            factor = 1.01 if is_wrong(len(next(iter(feeds.values()))), rewrites) else 1
            return {name: array * np.float32(factor) for name, array in run(self, feeds, outputs).items()}

        monkeypatch.setattr(OnnxRuntimeSession, "run", wrong)

    return break_where
