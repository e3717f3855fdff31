"""Where the `graphkiln` command begins: importing the verbs takes time, in which a server may already be stopped."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext

from graphkiln_backend.server.signals import ending_on_signals

# As a shell reports a program that Ctrl-C ended.
_INTERRUPTED = 128 + signal.SIGINT
_STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}


def main() -> None:
    """Runs the command; `serve` ends in good order from the first moment on."""
    if sys.getfilesystemencoding() != "utf-8":
        _start_again_in_utf8()
    hear_signals()
    open_closed_streams()
    with ending_on_signals() if "serve" in sys.argv[1:2] else nullcontext():
        try:
            from graphkiln.cli.main import main as run

            run()
        except KeyboardInterrupt:  # while the verbs are imported; later, typer does the same
            sys.exit(_INTERRUPTED)


def hear_signals() -> None:
    """Takes back what whoever started this process has left to it: ignored ends of children, signals that are blocked.

    Else nobody could tell how a child has ended, and a tritonserver that was killed would have ended well; nor could
    anybody stop this process, or what it starts. Sources: wait(2), NOTES; sigprocmask(2).
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})


def open_closed_streams() -> None:
    """Has standard streams lead nowhere that were closed when this process was started (`>&-`).

    The next file that is opened would else get the number of one, and what libraries, tritonserver and tracebacks print
    would be written into it.
    """
    for name, mode in _STREAMS.items():
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(_open_nowhere(), mode, encoding="utf-8"))


def _open_nowhere() -> int:
    """Opens what swallows everything under the lowest free number: that of the stream. Children have it, too."""
    descriptor = os.open(os.devnull, os.O_RDWR)
    os.set_inheritable(descriptor, True)
    return descriptor


def _start_again_in_utf8() -> None:
    """Replaces this process: names of files that are not ASCII are no names for the runtimes' libraries otherwise.

    So it is where somebody has turned off what Python does by itself in the locale C (PEP 538, PEP 540).
    """
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - the same program
