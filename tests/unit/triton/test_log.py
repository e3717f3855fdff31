"""Log records forwarded to Triton."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from fake_triton import Logger

from graphkiln_backend.triton.log import log_to_triton


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    logger = logging.getLogger("graphkiln")
    level, handlers = logger.level, logger.handlers
    yield
    logger.setLevel(level)
    logger.handlers = handlers


def test_lines_have_the_model_and_the_level() -> None:
    log_to_triton("digits")
    logging.getLogger("graphkiln.lowering").info("%d candidates", 3)
    logging.getLogger("graphkiln.triton").warning("padded")
    logging.getLogger("graphkiln.cache").error("damaged")
    assert Logger.lines == [
        ("info", "graphkiln: digits: 3 candidates"),
        ("warning", "graphkiln: digits: padded"),
        ("warning", "graphkiln: digits: damaged"),
    ]


def test_other_loggers_are_unchanged() -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    log_to_triton("digits")
    logging.getLogger("other").warning("not graphkiln's")
    assert not Logger.lines
    assert (root.level, root.handlers) == before


def test_traceback_is_logged() -> None:
    log_to_triton("digits")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logging.getLogger("graphkiln.triton").exception("a request failed")
    ((_, line),) = Logger.lines
    assert line.startswith("graphkiln: digits: a request failed\nTraceback")
    assert line.endswith("ZeroDivisionError: division by zero")


def test_request_id_is_logged() -> None:
    log_to_triton("digits")
    logging.getLogger("graphkiln.triton").warning("refused", extra={"request_id": 'a"] b'})
    logging.getLogger("graphkiln.triton").warning("refused", extra={"request_id": ""})
    assert Logger.lines == [
        ("warning", r'graphkiln: digits: [request id: "a\"] b"] refused'),
        ("warning", "graphkiln: digits: refused"),
    ]
