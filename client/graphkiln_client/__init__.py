"""The thin client: an image or tensors in, labeled answers out, over HTTP or gRPC.

For example `Client("http://localhost:8000").model("digits").classify("seven.png").top`.
"""

from graphkiln_client.api import Client, Model
from graphkiln_client.asynchronous import AsyncClient
from graphkiln_client.asynchronous_model import AsyncModel
from graphkiln_client.results import Classification, Health, Result, ServedModel

__all__ = [
    "AsyncClient",
    "AsyncModel",
    "Classification",
    "Client",
    "Health",
    "Model",
    "Result",
    "ServedModel",
]
