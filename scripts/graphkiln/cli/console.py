"""How the command speaks to a person: lines on stderr, where they do not disturb what programs read."""

from __future__ import annotations

import logging

import typer


def say(line: str) -> None:
    """Prints one line on stderr."""
    typer.echo(f"graphkiln: {line}", err=True)


def printable(text: str) -> str:
    """A text whose control characters are written out: what a server or a file says may hold a terminal's commands."""
    return "".join(each if each.isprintable() or each in "\n\t" else ascii(each)[1:-1] for each in text)


def log_to_stderr() -> None:
    """Shows the records of the loggers `graphkiln.*`, a line each; the root logger stays as it is."""
    logger = logging.getLogger("graphkiln")
    logger.setLevel(logging.INFO)
    logger.handlers = [_StderrHandler()]
    logging.getLogger("onnx_ir").setLevel(logging.CRITICAL)  # it logs tracebacks of what it then does without


class _StderrHandler(logging.Handler):
    """Prints records as `say` prints the command's own lines."""

    def emit(self, record: logging.LogRecord) -> None:
        say(record.getMessage())
