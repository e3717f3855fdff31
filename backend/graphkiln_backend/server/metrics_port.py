"""What a server on this machine publishes on its metrics port."""

from __future__ import annotations

from urllib.request import ProxyHandler, build_opener

from graphkiln_backend.graph.files import MIB

_TIMEOUT_S = 5
_LIMIT = 16 * MIB


def fetch_metrics(url: str) -> str:
    """The text, in Prometheus' format. No proxy is asked, whatever the environment names.

    Args:
        url: Of the port, with its path.

    Raises:
        OSError: Nobody answers.
        ValueError: It is no URL.
    """
    with build_opener(ProxyHandler({})).open(url, timeout=_TIMEOUT_S) as response:
        return str(response.read(_LIMIT).decode("utf-8", "replace"))
