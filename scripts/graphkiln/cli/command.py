"""Where the `graphkiln` command begins: importing the verbs takes time, in which a server may already be stopped."""

from __future__ import annotations

import sys
from contextlib import nullcontext

from graphkiln_backend.server.signals import ending_on_signals


def main() -> None:
    """Runs the command; `serve` ends in good order from the first moment on."""
    with ending_on_signals() if "serve" in sys.argv[1:2] else nullcontext():
        from graphkiln.cli.main import main as run

        run()
