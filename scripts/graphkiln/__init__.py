"""graphkiln: trained models in, proven static graphs out, served on NVIDIA Triton.

    import graphkiln

    with graphkiln.Client("http://localhost:8000") as client:
        print(client.model("digits").classify("docs/digits/seven.png").top)

Every name below is imported at its first use (PEP 562), so that `import graphkiln` costs nothing and needs no extra.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from graphkiln import scoring
    from graphkiln_backend.graph.errors import ClientError, GraphkilnError
    from graphkiln_backend.graph.manifest import Manifest
    from graphkiln_backend.graph.preprocess import Preprocess
    from graphkiln_backend.graph.signature import Signature
    from graphkiln_backend.server.rollout_changes import rollout
    from graphkiln_client import AsyncClient, Client
    from graphkiln_converters.convert import convert
    from graphkiln_converters.recipe import Recipe
    from graphkiln_converters.verify import verify

__all__ = [
    "AsyncClient",
    "Client",
    "ClientError",
    "GraphkilnError",
    "Manifest",
    "Preprocess",
    "Recipe",
    "Signature",
    "convert",
    "rollout",
    "scoring",
    "verify",
]

_HOMES = {
    "AsyncClient": "graphkiln_client",
    "Client": "graphkiln_client",
    "ClientError": "graphkiln_backend.graph.errors",
    "GraphkilnError": "graphkiln_backend.graph.errors",
    "Manifest": "graphkiln_backend.graph.manifest",
    "Preprocess": "graphkiln_backend.graph.preprocess",
    "Recipe": "graphkiln_converters.recipe",
    "Signature": "graphkiln_backend.graph.signature",
    "convert": "graphkiln_converters.convert",
    "rollout": "graphkiln_backend.server.rollout_changes",
    "verify": "graphkiln_converters.verify",
}


def __getattr__(name: str) -> Any:
    """Imports a public name from its home."""
    if name == "scoring":  # a room of this package, which importing binds to its name here
        return import_module("graphkiln.scoring")
    if name not in _HOMES:
        raise AttributeError(f"module 'graphkiln' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names."""
    return __all__
