"""What the packages log, as lines on stderr."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from graphkiln.cli.console import log_to_stderr, say


@pytest.fixture(autouse=True)
def _loggers_as_before() -> Iterator[None]:
    logger = logging.getLogger("graphkiln")
    level, handlers = logger.level, logger.handlers
    yield
    logger.level, logger.handlers = level, handlers


def test_a_line_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    say("ready")
    assert capsys.readouterr() == ("", "graphkiln: ready\n")


def test_records_are_lines_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    logging.getLogger("graphkiln.cache").info("built %s in %.1f s", "m/1", 2)
    logging.getLogger("graphkiln.server").warning("100%")
    assert capsys.readouterr() == ("", "graphkiln: built m/1 in 2.0 s\ngraphkiln: 100%\n")


def test_what_is_for_developers_is_not_shown(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    logging.getLogger("graphkiln.cache").debug("looked")
    logging.getLogger("onnx").warning("somebody else's")
    assert "looked" not in capsys.readouterr().err
    assert logging.getLogger().level == logging.WARNING


def test_twice_shows_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    log_to_stderr()
    logging.getLogger("graphkiln").info("once")
    assert capsys.readouterr().err == "graphkiln: once\n"


def test_the_root_logger_stays_as_it_is() -> None:
    before = list(logging.getLogger().handlers)
    log_to_stderr()
    assert logging.getLogger().handlers == before
