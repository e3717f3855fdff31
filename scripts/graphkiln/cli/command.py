"""Entry point of the `graphkiln` command: set up signals and streams before the slow import of the verbs."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext

from graphkiln_backend.system.signals import ending_on_signals

# Exit code that shells report for a program ended by Ctrl-C.
_INTERRUPTED = 128 + signal.SIGINT
_STREAMS = {"stdin": "r", "stdout": "w", "stderr": "w"}


def main() -> None:
    """Run the command; `serve` shuts down cleanly on signals from the beginning."""
    if sys.getfilesystemencoding() != "utf-8":
        _start_again_in_utf8()
    reset_signals()
    open_closed_streams()
    with ending_on_signals() if "serve" in sys.argv[1:2] else nullcontext():
        try:
            from graphkiln.cli.main import main as run

            run()
        except KeyboardInterrupt:  # during the import; later, typer handles it
            sys.exit(_INTERRUPTED)


def reset_signals() -> None:
    """Reset an ignored SIGCHLD and blocked signals, which a process inherits from its parent.

    With SIGCHLD ignored, exit codes of children are lost, so that a killed tritonserver would look like a clean exit.
    With signals blocked, neither this process nor its children could be stopped. Sources: wait(2), NOTES;
    sigprocmask(2).
    """
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGCHLD})


def open_closed_streams() -> None:
    """Redirect closed standard streams (`>&-`) to the null device.

    Otherwise the next opened file would get the descriptor of a standard stream, and output of libraries and
    tracebacks would be written into it.
    """
    for name, mode in _STREAMS.items():
        if getattr(sys, name) is None:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free one: that of the stream
            os.set_inheritable(descriptor, True)
            setattr(sys, name, os.fdopen(descriptor, mode, encoding="utf-8"))


def _start_again_in_utf8() -> None:
    """Replace this process by one in UTF-8 mode: the runtimes' libraries cannot open non-ASCII paths otherwise.

    Needed if Python's coercion of the locale C (PEP 538, PEP 540) is disabled.
    """
    command = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})  # noqa: S606 - the same program
