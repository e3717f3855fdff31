"""Credentials that Triton's own file gives: `TRITON_CLOUD_CREDENTIAL_PATH` names a JSON document of all services.

Without it, the services' own clients find theirs. Of the entries of a service, the one counts whose name is the longest
beginning of the address. What is secret stands in no message.
Source: "Cloud Storage with Credential file" in Triton's user guide.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.spelling import did_you_mean
from graphkiln_backend.repository.remote_address import RemoteAddress, RemoteStoreError

VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
_LIMIT = 1 << 20
_S3 = {"key_id": "key", "secret_key": "secret", "session_token": "token", "profile": "profile"}
"""Triton's word -> that of the client."""
_AZURE = {"account_str": "account_name", "account_key": "account_key"}
_REGION = "region"
_KEY, _ACCOUNT = "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT"
"""Triton's own variables, which Azure's client for Python does not know."""


def client_options(address: RemoteAddress, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What a service's client is told of credentials; nothing where it finds its own.

    Args:
        address: The store.
        environment: Variables.

    Raises:
        RemoteStoreError: The file that the environment names cannot be used.
    """
    if address.scheme in {"hf", "oci"}:  # not Triton's
        return {}
    if path := environment.get(VARIABLE):
        return _options(address, _choose(address, _read(path), path), path)
    own = address.options.get("account_name")
    if address.scheme == "as" and environment.get(_KEY) and environment.get(_ACCOUNT, own) == own:
        return {"account_key": environment[_KEY]}
    return {}


def _read(path: str) -> Mapping[str, Any]:
    try:
        with Path(path).open("rb") as file:
            document = json.loads(file.read(_LIMIT))
    except OSError as error:
        raise _error(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _error(path, "is not JSON") from error
    if not isinstance(document, dict):
        raise _error(path, "is no JSON object")
    return document


def _choose(address: RemoteAddress, document: Mapping[str, Any], path: str) -> Any:
    """The credential of the longest name that the address begins with; None where there is none."""
    entries = document.get(address.scheme, {})
    if not isinstance(entries, dict):
        raise _error(path, f"'{address.scheme}' must be an object of credentials by address, '' for all")
    named = [name for name in entries if str(address).startswith(name)]
    return entries[max(named, key=len)] if named else None


def _options(address: RemoteAddress, credential: Any, path: str) -> dict[str, Any]:
    if credential is None:
        return {}
    if address.scheme == "gs":
        return _google(credential, path)
    known = {**_S3, _REGION: ""} if address.scheme == "s3" else _AZURE
    if not isinstance(credential, dict):
        raise _error(path, f"a credential of '{address.scheme}' must be an object of {', '.join(known)}")
    for key, value in credential.items():
        if key not in known:
            raise _error(path, f"unknown key '{key}' in '{address.scheme}'", did_you_mean(key, known))
        if not isinstance(value, str):
            raise _error(path, f"'{key}' in '{address.scheme}' must be text")
    options: dict[str, Any] = {known[key]: value for key, value in credential.items() if value and key != _REGION}
    if region := credential.get(_REGION):
        options["client_kwargs"] = {"region_name": region}
    return options


def _google(credential: Any, path: str) -> dict[str, Any]:
    if not isinstance(credential, str):
        raise _error(path, "a credential of 'gs' must be the path of a service account's JSON file")
    if credential and not Path(credential).is_file():
        raise _error(path, f"names {credential} for 'gs', which is no file")
    return {"token": credential} if credential else {}


def _error(path: str, message: str, hint: str = "") -> RemoteStoreError:
    return RemoteStoreError(
        f"{VARIABLE}: {path}: {message}",
        hint=hint or 'for example {"s3": {"": {"key_id": "...", "secret_key": "...", "region": "..."}}}',
    )
