"""Run the command in this process."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from commands import FakeClient, Finished, RunVerb

from graphkiln.cli.connection import ConnectionOptions
from graphkiln.cli.main import main


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
