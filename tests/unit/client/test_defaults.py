"""Importing the client's defaults, as the command line does."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_command_line_imports_nothing_heavy() -> None:
    program = "import sys, graphkiln.cli.main as main; main.app; print(' '.join(sys.modules))"
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    heavy = {"numpy", "onnxruntime", "torch", "tritonclient", "aiohttp", "grpc", "PIL", "rich"}
    assert not heavy & set(shown.stdout.split())
