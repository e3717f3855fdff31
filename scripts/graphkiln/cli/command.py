"""Where the `graphkiln` command begins: importing the verbs takes time, in which a server may already be stopped."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext

from graphkiln_backend.server.signals import ending_on_signals

_INTERRUPTED = 128 + signal.SIGINT
"""As a shell reports a program that Ctrl-C ended."""


def main() -> None:
    """Runs the command; `serve` ends in good order from the first moment on."""
    if sys.getfilesystemencoding() != "utf-8":
        _start_again_in_utf8()
    with ending_on_signals() if "serve" in sys.argv[1:2] else nullcontext():
        try:
            from graphkiln.cli.main import main as run

            run()
        except KeyboardInterrupt:  # while the verbs are imported; later, typer does the same
            sys.exit(_INTERRUPTED)


def _start_again_in_utf8() -> None:
    """Replaces this process: names of files that are not ASCII are no names for the runtimes' libraries otherwise.

    So it is where somebody has turned off what Python does by itself in the locale C (PEP 538, PEP 540).
    """
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - the same program
