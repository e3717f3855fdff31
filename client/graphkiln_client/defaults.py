"""Defaults of the clients. Imports nothing, so that the command line can show them at no cost."""

from __future__ import annotations

DEFAULT_URL = "http://localhost:8000"
DEFAULT_TIMEOUT_S = 30.0
DEFAULT_MAX_RETRIES = 2
