"""The loggers `graphkiln.*` of an instance, forwarded to Triton's own log under the model's name."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils

from graphkiln_backend.triton.failures import request_prefix

_FORMATTER = logging.Formatter()


class _TritonHandler(logging.Handler):
    """Hands records to Triton, each with the model and the request before it, and its traceback if it has one."""

    def __init__(self, model: str) -> None:
        super().__init__(logging.INFO)
        self._model = model

    def emit(self, record: logging.LogRecord) -> None:
        line = f"graphkiln: {self._model}: {request_prefix(getattr(record, 'request_id', ''))}{record.getMessage()}"
        if record.exc_info:
            line += "\n" + _FORMATTER.formatException(record.exc_info)
        log = pb_utils.Logger.log_warn if record.levelno >= logging.WARNING else pb_utils.Logger.log_info
        log(line)


def log_to_triton(model: str) -> None:
    """Sends what graphkiln's packages log to Triton's log; an instance is a process of its own, with one model."""
    logger = logging.getLogger("graphkiln")
    logger.setLevel(logging.INFO)
    logger.handlers = [_TritonHandler(model)]
