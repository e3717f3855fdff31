"""Triton's model repository extension: which versions are loaded, and load or unload a model."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Protocol

from graphkiln_backend.graph.text import in_path
from graphkiln_backend.server.flags import ListenAddress

_TIMEOUT_S = 5.0
# Triton's reason for a version that it no longer serves as requested; any other reason means that it failed.
_UNLOADED = "unloaded"


@dataclass(frozen=True, kw_only=True, slots=True)
class VersionState:
    """A model version as the server lists it.

    Attributes:
        model: Model name.
        version: Model version; empty for a model of which no version was ever loaded.
        state: Triton's state: `READY`, `LOADING`, `UNAVAILABLE`, ...; `UNLOADED` where it names none.
        reason: Triton's reason for a state other than READY.
    """

    model: str
    version: str
    state: str
    reason: str

    @property
    def failed(self) -> bool:
        """Whether it could not be loaded, for which Triton's readiness is "no"."""
        return self.state == "UNAVAILABLE" and self.reason != _UNLOADED


@dataclass(frozen=True, kw_only=True, slots=True)
class LoadOverride:
    """What to load in the place of a model's folder: nobody else who loads the model ever sees it.

    Attributes:
        config: The configuration, as JSON.
        files: Contents by path below the model's folder.
    """

    config: str
    files: Mapping[str, str]


class RepositoryControl(Protocol):
    """What the supervisor asks of a running server. Every call may raise OSError: the server may end at any time."""

    def index(self) -> list[VersionState]:
        """Every version that the server knows."""

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Loads what the repository holds of a model, or something else; returns why that failed, or nothing."""

    def unload(self, model: str) -> None:
        """Unloads a model with all its versions; returns before that is done."""


@dataclass(frozen=True, slots=True)
class HttpControl:
    """The extension over HTTP.

    Args:
        address: Where the server listens.
        headers: What its restricted endpoints need.
    """

    address: ListenAddress
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def index(self) -> list[VersionState]:
        """Every version that the server knows.

        Raises:
            OSError: The server does not list them.
        """
        path = "/v2/repository/index"
        status, body = self._post(path, _TIMEOUT_S)
        if status != HTTPStatus.OK:
            raise ConnectionError(f"port {self.address.port} responded with status {status} to {path}")
        return [
            VersionState(
                model=row["name"],
                version=row.get("version", ""),
                state=row.get("state", "UNLOADED"),
                reason=row.get("reason", ""),
            )
            for row in json.loads(body)
        ]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        """Loads what the repository holds of a model, or something else; returns why that failed, or nothing.

        Raises:
            OSError: The server did not respond.
        """
        return self._change(model, "load", timeout_s, _to_json(override) if override else b"")

    def unload(self, model: str) -> None:
        """Unloads a model with all its versions; returns before that is done.

        Raises:
            OSError: The server did not do it.
        """
        if error := self._change(model, "unload", _TIMEOUT_S):
            raise ConnectionError(f"{model} cannot be unloaded: {error}")

    def _change(self, model: str, verb: str, timeout_s: float, request: bytes = b"") -> str:
        status, body = self._post(f"/v2/repository/models/{in_path(model)}/{verb}", timeout_s, request)
        return "" if status == HTTPStatus.OK else _error_text(body) or f"status {status}"

    def _post(self, path: str, timeout_s: float, request: bytes = b"") -> tuple[int, bytes]:
        from http.client import HTTPConnection, HTTPException  # with ssl, which the start of a server need not wait for

        connection = HTTPConnection(*self.address.local_address, timeout=timeout_s)
        try:
            connection.request("POST", path, request, headers={"Connection": "close", **self.headers})
            response = connection.getresponse()
            return response.status, response.read()
        except HTTPException as error:
            raise ConnectionError(f"port {self.address.port} broke off its response: {error}") from error
        finally:
            connection.close()


def _to_json(override: LoadOverride) -> bytes:
    files = {f"file:{path}": base64.b64encode(text.encode()).decode() for path, text in override.files.items()}
    return json.dumps({"parameters": {"config": override.config, **files}}).encode()


def _error_text(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"])
    except (ValueError, KeyError, TypeError):
        return ""
