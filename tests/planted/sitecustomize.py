"""Faults for workers of `graphkiln score`: with this folder on PYTHONPATH, images whose content is a word are faults.

Python imports a module of this name at its start. It has no effect in other processes than workers.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def plant() -> None:
    from graphkiln_backend.engines.onnxruntime.session import OnnxRuntimeSession
    from graphkiln_backend.scoring.worker import Worker

    load, run = Worker._load, OnnxRuntimeSession.run
    wrong = []

    def planted(*arguments, **options):
        content = load(*arguments, **options)
        match content:
            case b"segfault":
                signal.raise_signal(signal.SIGSEGV)  # in this thread, as a decoder would
            case b"stop" | b"hang":
                Path(os.environ["GRAPHKILN_PLANTED"], str(os.getpid())).touch()  # the test now waits for a short time
                if content == b"stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(3600)
            case b"wait":
                while not Path(os.environ["GRAPHKILN_PLANTED"], "go on").exists():
                    time.sleep(0.05)
            case b"raise":
                raise RecursionError("too deep")
            case b"wrong":
                wrong.append(True)
        return content

    def computed(session, feeds, outputs=None):
        found = run(session, feeds, outputs)
        return {name: array + 1 for name, array in found.items()} if wrong else found

    Worker._load, OnnxRuntimeSession.run = planted, computed


def plant_disk() -> None:
    from graphkiln_backend.scoring.errors import SourceUnavailable
    from graphkiln_backend.scoring.sources.storage import LocalStorage

    read = LocalStorage.read

    def read_from_disk(*arguments, **options):
        content = read(*arguments, **options)
        if content == b"no disk":
            raise SourceUnavailable("cannot read it: Input/output error")
        return content

    LocalStorage.read = read_from_disk


_WORKERS = ("default_worker.py", "graphkiln_backend.scoring.worker_process")  # of Ray, which becomes an actor; ours
if any(word.endswith(_WORKERS) for word in sys.orig_argv):
    plant()
    plant_disk()
