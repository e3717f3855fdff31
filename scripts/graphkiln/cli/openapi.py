"""`graphkiln openapi`: an OpenAPI 3.1 document of a model's own API, for generated clients and for people."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

import typer

from graphkiln.cli.console import print_json
from graphkiln.cli.options import ModelPath, local_path, read_any_version, version_folder
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_client import DEFAULT_URL


def openapi(
    path: ModelPath,
    server: Annotated[
        str, typer.Option(help="Address of the server in the document, http or https.", metavar="URL")
    ] = DEFAULT_URL,
) -> None:
    """Print an OpenAPI 3.1 document of a model's HTTP API.

    Inputs and outputs with their types and shapes, preprocessing and labels, health and metadata; also NAME.images if
    the model accepts encoded images. STORE/NAME describes the newest version by paths without a version number.
    """
    from graphkiln.cli.lower import complete_version_config, open_artifact_cache
    from graphkiln.cli.openapi_document import Described, describe
    from graphkiln_backend.repository.publication import complete_contract
    from graphkiln_backend.repository.version_folders import is_version
    from graphkiln_backend.server.image_models import find_taker

    _check_server(server)
    with local_path(path) as folder, open_artifact_cache("off") as artifacts:
        version = version_folder(folder).absolute()
        config = complete_version_config(version, artifacts)
        stored = read_any_version(version)
        contract = complete_contract(stored, config, version.parent)
        described = Described(
            config=config,
            image_config=find_taker(config),
            contract=contract,
            version=version.name,
            is_pinned=is_version(folder.absolute().name) or folder.is_file(),
            source=stored.manifest.provenance.source if stored.manifest else "",
        )
        print_json(describe(described, server.rstrip("/")))


def _check_server(url: str) -> None:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InvalidInput(
            f"--server: expected http://HOST:PORT or https://HOST:PORT, got {url!r}",
            hint="OpenAPI describes HTTP; for gRPC, clients are generated from KServe's .proto file",
        )
