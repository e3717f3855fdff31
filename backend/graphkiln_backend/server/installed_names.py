"""Under which names config.pbtxt means our backend on this machine."""

from __future__ import annotations

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import installation
from graphkiln_backend.server.run_folder import BACKEND_NAMES, backend_names


def installed_backend_names() -> frozenset[str]:
    """The names under which `serve` installs our backend here; all of its names where no Triton is installed."""
    try:
        return backend_names([installation.find_installation().backends], replace_onnxruntime=False)
    except ServerSetupError:
        return BACKEND_NAMES
