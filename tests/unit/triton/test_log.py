"""graphkiln's loggers in Triton's log."""

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


def test_lines_begin_with_the_model_and_have_tritons_level() -> None:
    log_to_triton("digits")
    logging.getLogger("graphkiln.lowering").info("%d candidates", 3)
    logging.getLogger("graphkiln.triton").warning("padded")
    logging.getLogger("graphkiln.cache").error("damaged")
    assert Logger.lines == [
        ("info", "graphkiln: digits: 3 candidates"),
        ("warning", "graphkiln: digits: padded"),
        ("warning", "graphkiln: digits: damaged"),
    ]


def test_details_for_developers_are_left_out() -> None:
    log_to_triton("digits")
    logging.getLogger("graphkiln.lowering").debug("detail")
    assert not Logger.lines


def test_a_line_is_logged_once_although_it_was_set_up_twice() -> None:
    log_to_triton("digits")
    log_to_triton("digits")
    logging.getLogger("graphkiln.lowering").info("once")
    assert len(Logger.lines) == 1


def test_other_libraries_and_the_root_logger_are_left_alone() -> None:
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    log_to_triton("digits")
    logging.getLogger("other").warning("not graphkiln's")
    assert not Logger.lines
    assert (root.level, root.handlers) == before


def test_the_traceback_of_what_nobody_foresaw_is_logged() -> None:
    log_to_triton("digits")
    try:
        _ = 1 / 0
    except ZeroDivisionError:
        logging.getLogger("graphkiln.triton").exception("a request failed")
    ((_, line),) = Logger.lines
    assert line.startswith("graphkiln: digits: a request failed\nTraceback")
    assert line.endswith("ZeroDivisionError: division by zero")


def test_a_line_about_a_request_names_it() -> None:
    log_to_triton("digits")
    logging.getLogger("graphkiln.triton").warning("refused", extra={"request_id": 'a"] b'})
    logging.getLogger("graphkiln.triton").warning("refused", extra={"request_id": ""})
    assert Logger.lines == [
        ("warning", r'graphkiln: digits: [request id: "a\"] b"] refused'),
        ("warning", "graphkiln: digits: refused"),
    ]
