"""Forward the loggers `graphkiln.*` of an instance to Triton's own log, under the model's name."""

from __future__ import annotations

import logging

import triton_python_backend_utils as pb_utils

from graphkiln_backend.graph.text import request_prefix

_FORMATTER = logging.Formatter()


def log_to_triton(model: str) -> None:
    """Forward log records of graphkiln's packages to Triton; an instance's process has exactly one model."""
    logger = logging.getLogger("graphkiln")
    logger.setLevel(logging.INFO)
    logger.handlers = [_TritonHandler(model)]


class _TritonHandler(logging.Handler):
    """Prefix each record with its model and request id, and append its traceback."""

    def __init__(self, model: str) -> None:
        super().__init__(logging.INFO)
        self._model = model

    def emit(self, record: logging.LogRecord) -> None:
        line = f"graphkiln: {self._model}: {request_prefix(getattr(record, 'request_id', ''))}{record.getMessage()}"
        if record.exc_info:
            line += "\n" + _FORMATTER.formatException(record.exc_info)
        log = pb_utils.Logger.log_warn if record.levelno >= logging.WARNING else pb_utils.Logger.log_info
        log(line)
