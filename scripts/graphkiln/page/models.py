"""The list of models, and the description of one version."""

from __future__ import annotations

from typing import Any

from graphkiln.page.server import ShownServer
from graphkiln_backend.graph.decoding import encode
from graphkiln_backend.graph.errors import ClientError, GraphkilnError
from graphkiln_backend.graph.task import is_classification
from graphkiln_client.published import ServedVersion, published_tensor_model

_READY = "READY"


async def list_models(server: ShownServer, admin_key: str) -> list[dict[str, Any]]:
    """Every model version that is loaded; with the admin key, those too that are not, and why.

    Returns:
        Rows of `name`, `version`, `state`, `reason`, and of `engine`, `device`, `precision` where they are known.

    Raises:
        Unauthorized: The key is wrong.
        ClientError: The request failed.
    """
    found = await _index(server, admin_key) if admin_key else await _loaded(server)
    placed = await server.placements()
    return [{**row, **placed.get((row["name"], row["version"]), {})} for row in found]


async def describe_version(server: ShownServer, name: str, version: str) -> dict[str, Any]:
    """Describe a version from the server and the store as they are now.

    Returns:
        `inputs` and `outputs` of the signature, `max_batch_size`, `kind` of task (empty for a model that takes no
        images), `preprocess`, `labels`, `proof` with `proof_problem`, `image_model`, and how it is placed.

    Raises:
        ClientError: The request failed.
    """
    server.forget(name, version)
    served = await server.served(name, version)
    placed = await server.placements()
    return {
        "name": name,
        "version": version,
        "inputs": served.metadata["inputs"],
        "outputs": served.metadata["outputs"],
        "platform": served.metadata.get("platform", ""),
        "max_batch_size": served.config.get("max_batch_size", 0),
        "image_model": served.image_model(),
        "tensor_model": published_tensor_model(served.config),
        **_image_facts(served),
        **_proof(server, name, version),
        **placed.get((name, version), {}),
    }


def kind_of(served: ServedVersion) -> str:
    """Task of a version: `classification`, `detection`, ...; empty for a model that takes no images.

    Raises:
        ProtocolError: What it publishes cannot be read.
    """
    if not _takes_images(served):
        return ""
    task = served.task
    return "classification" if task is None or is_classification(task) else task.kind


def _takes_images(served: ServedVersion) -> bool:
    try:
        return bool(served.preprocess)
    except ClientError:
        return False


def _image_facts(served: ServedVersion) -> dict[str, Any]:
    kind = kind_of(served)
    labels = served.contract.labels if served.contract else ()
    ranking = served.ranking
    return {
        "kind": kind,
        "preprocess": encode(served.preprocess) if kind else None,
        "labels": list(labels or (ranking.labels if ranking else ())),
    }


def _proof(server: ShownServer, name: str, version: str) -> dict[str, Any]:
    try:
        return {"proof": server.stores.proof(name, version), "proof_problem": ""}
    except GraphkilnError as error:
        return {"proof": None, "proof_problem": str(error)}


async def _loaded(server: ShownServer) -> list[dict[str, Any]]:
    rows = [(str(row.get("name", "")), str(row.get("version", ""))) for row in await server.client.statistics()]
    return [{"name": name, "version": version, "state": _READY, "reason": ""} for name, version in sorted(rows)]


async def _index(server: ShownServer, admin_key: str) -> list[dict[str, Any]]:
    async with server.connect(admin_key) as client:
        models = await client.models()
    return [
        {"name": row.name, "version": row.version, "state": row.state or "UNLOADED", "reason": row.reason}
        for row in models
    ]
