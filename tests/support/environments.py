"""Environments of tools whose requirements do not fit ours."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def make_environment(folder: Path, *requirements: str) -> Path:
    """Install packages into a virtual environment; return the folder of its programs."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True, timeout=120)
    programs = folder / "bin"
    install = [programs / "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *requirements]
    installed = subprocess.run(install, capture_output=True, text=True, timeout=280, check=False)
    assert installed.returncode == 0, f"{requirements} could not be installed: {installed.stderr}"
    return programs
