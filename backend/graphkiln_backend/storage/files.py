"""Remote folders over fsspec: credentials, translation of errors, listing and fetching.

Errors of the libraries of five services are translated here. Their classes are recognized by name, so that unused
libraries are not imported; causes of errors count, too, because some libraries wrap errors.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from graphkiln_backend.graph.text import did_you_mean, redact
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.oci import OciFileSystem

_log = logging.getLogger("graphkiln.repository")
_Item = TypeVar("_Item")

# Path of a JSON document with credentials of all services. Source: "Cloud Storage with Credential file" in Triton's
# user guide.
VARIABLE = "TRITON_CLOUD_CREDENTIAL_PATH"
_LIMIT = 1 << 20
_EXAMPLE = 'for example {"s3": {"": {"key_id": "...", "secret_key": "...", "region": "..."}}}'
# Triton's keys -> options of s3fs and adlfs.
_OPTIONS = {
    "s3": {"key_id": "key", "secret_key": "secret", "session_token": "token", "profile": "profile", "region": ""},
    "as": {"account_str": "account_name", "account_key": "account_key"},
}
# Triton's variables, which Azure's Python client does not read.
_KEY, _ACCOUNT = "AZURE_STORAGE_KEY", "AZURE_STORAGE_ACCOUNT"


def client_options(address: RemoteAddress, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """Credentials for a service's client; empty to let the client find them.

    In Triton's file, the longest entry that is a prefix of the address applies. Messages contain no secrets.

    Args:
        address: The store.
        environment: Environment variables.

    Raises:
        RemoteStoreError: The file of credentials cannot be used.
    """
    if address.scheme in {"hf", "oci"}:  # not in Triton's format
        return {}
    if path := environment.get(VARIABLE):
        credential = _read_credential(address, path)
        if credential is None:
            return {}
        return _google(credential, path) if address.scheme == "gs" else _options(address.scheme, credential, path)
    own = address.options.get("account_name")
    if address.scheme == "as" and environment.get(_KEY) and environment.get(_ACCOUNT, own) == own:
        return {"account_key": environment[_KEY]}
    return {}


def _read_credential(address: RemoteAddress, path: str) -> Any:
    try:
        with Path(path).open("rb") as file:
            document = json.loads(file.read(_LIMIT))
    except OSError as error:
        raise _unusable(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _unusable(path, "is not JSON") from error
    if not isinstance(document, dict):
        raise _unusable(path, "is not a JSON object")
    entries = document.get(address.scheme, {})
    if not isinstance(entries, dict):
        raise _unusable(path, f"'{address.scheme}' must be an object of credentials by address, '' for all")
    named = [name for name in entries if str(address).startswith(name)]
    return entries[max(named, key=len)] if named else None


def _options(scheme: str, credential: Any, path: str) -> dict[str, Any]:
    known = _OPTIONS[scheme]
    if not isinstance(credential, dict):
        raise _unusable(path, f"a credential of '{scheme}' must be an object of {', '.join(known)}")
    for key, value in credential.items():
        if key not in known:
            raise _unusable(path, f"unknown key '{key}' in '{scheme}'", did_you_mean(key, known))
        if not isinstance(value, str):
            raise _unusable(path, f"'{key}' in '{scheme}' must be text")
    options: dict[str, Any] = {known[key]: value for key, value in credential.items() if value and known[key]}
    if region := credential.get("region"):
        options["client_kwargs"] = {"region_name": region}
    return options


def _google(credential: Any, path: str) -> dict[str, Any]:
    if not isinstance(credential, str):
        raise _unusable(path, "a credential of 'gs' must be the path of a service account's JSON file")
    if credential and not Path(credential).is_file():
        raise _unusable(path, f"names {credential} for 'gs', which is not a file")
    return {"token": credential} if credential else {}


def _unusable(path: str, message: str, hint: str = _EXAMPLE) -> RemoteStoreError:
    return RemoteStoreError(f"{VARIABLE}: {path}: {message}", hint=hint or _EXAMPLE)


_TIMEOUTS = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 2}}
# Keys of ETags in listings: S3, Azure and Google, Hugging Face, Google.
_STAMP_KEYS = ("ETag", "etag", "blob_id", "md5Hash", "generation")
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, TRITON_CLOUD_CREDENTIAL_PATH, or a role",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, gcloud auth application-default login, or TRITON_CLOUD_CREDENTIAL_PATH",
    "as": "AZURE_STORAGE_KEY, AZURE_STORAGE_CONNECTION_STRING, or TRITON_CLOUD_CREDENTIAL_PATH",
    "hf": "HF_TOKEN, or hf auth login",
    "oci": "docker login HOST, or another program that writes ~/.docker/config.json",
}
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "as": "adlfs", "hf": "huggingface_hub", "oci": "oras"}
_DENIED = {
    "PermissionError", "Forbidden", "ClientAuthenticationError", "GatedRepoError", "RefreshError",
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "AuthenticationException",
}  # fmt: skip
_NO_CREDENTIALS = {
    "NoCredentialsError", "PartialCredentialsError", "ProfileNotFound", "DefaultCredentialsError",
    "CredentialRetrievalError", "NoAuthTokenError", "LocalTokenNotFoundError", "TokenRetrievalError",
}  # fmt: skip
_ABSENT = {
    "FileNotFoundError",
    "NoSuchBucket",
    "RepositoryNotFoundError",
    "RevisionNotFoundError",
    "ResourceNotFoundError",
}
# Errors of clients for invalid names.
_INVALID = {"ParamValidationError"}
_UNREACHABLE = {
    "ConnectionError", "HTTPClientError", "ConnectTimeoutError", "ReadTimeoutError", "EndpointConnectionError",
    "ClientConnectionError", "ClientConnectorError", "ServiceRequestError", "ServiceResponseError", "TimeoutError",
    "gaierror", "TransportError", "FSTimeoutError", "ServerTimeoutError", "OfflineModeIsEnabled", "ProtocolError",
    "ChunkedEncodingError", "ClientPayloadError", "ResponseStreamingError",
}  # fmt: skip
_DISTRUST = re.compile(r"certificate verify failed: (.*?) ?(?:\(_ssl|['\"\])]|$)")
# Variables for trusted certificate authorities; SSL_CERT_FILE for the others.
_AUTHORITIES = {"s3": "AWS_CA_BUNDLE", "oci": "REQUESTS_CA_BUNDLE"}
_WORDS = 200
_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A listed file.

    Attributes:
        stamp: ETag or its equivalent, which changes with the content.
        size: Size in bytes.
    """

    stamp: str
    size: int


class RemoteFiles:
    """Files below a remote folder. The first call opens a connection.

    Args:
        address: The folder.
    """

    def __init__(self, address: RemoteAddress) -> None:
        self.address = address
        self._system: Any = None

    def list(self) -> dict[str, RemoteFile]:
        """List visible files by their paths below the folder.

        Raises:
            RemoteStoreError: The folder cannot be listed.
        """
        try:
            system = self._opened()
            system.invalidate_cache()
            found = system.find(self.address.root, detail=True)
        except Exception as error:
            raise translate(error, self.address) from error
        listed: dict[str, RemoteFile] = {}
        for name, details in found.items():
            path = str(name).lstrip("/").removeprefix(f"{self.address.root}/")
            if details.get("type") != "directory" and _is_wanted(path):
                listed[path] = RemoteFile(_stamp_of(details), int(details.get("size") or 0))
        return listed

    def fetch(self, path: str, target: Path) -> None:
        """Download a file.

        Raises:
            RemoteStoreError: The file cannot be read.
            OSError: The copy cannot be written.
        """
        try:
            self._opened().get_file(f"{self.address.root}/{path}", str(target))
        except Exception as error:
            if isinstance(error, OSError) and error.errno is not None and target.parent.exists() and _is_local(error):
                raise
            raise translate(error, replace(self.address, text=f"{self.address}/{path}")) from error

    def fetch_all(
        self, wanted: Mapping[str, RemoteFile], folder: Path, whole: Callable[[str], object] = lambda _: None
    ) -> None:
        """Download files into a folder, several at a time, and check their sizes.

        Args:
            wanted: Files by path, relative to both folders.
            folder: Target folder; missing folders are created.
            whole: Called with the path of each complete file, from several threads.

        Raises:
            RemoteStoreError: A file cannot be read, or was replaced.
            OSError: A copy cannot be written.
        """

        def fetch(path: str) -> None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            self.fetch(path, folder / path)
            if (size := (folder / path).stat().st_size) != wanted[path].size:
                words = f"{self.address}/{path}: got {size} bytes, expected {wanted[path].size}"
                raise RemoteStoreError(words, passing=True)
            whole(path)

        call_each(fetch, wanted, _AT_ONCE)

    def _opened(self) -> Any:
        if self._system is None:
            self._system = open_file_system(self.address)
        return self._system


def open_file_system(address: RemoteAddress) -> Any:
    """Open the file system of an address (fsspec or compatible), without a cache of listings.

    Raises:
        ImportError: Its package is not installed.
        RemoteStoreError: The file of credentials cannot be used.
    """
    if address.scheme == "oci":
        return OciFileSystem(address.options["protocol"])
    import fsspec

    protocol = {"gs": "gcs", "as": "abfs"}.get(address.scheme, address.scheme)
    options = {**address.options, **client_options(address)}
    if address.scheme == "s3":
        style = {"s3": {"addressing_style": "path"}} if "endpoint_url" in options else {}
        options["config_kwargs"] = _TIMEOUTS | style
    if address.scheme == "gs" and logging.getLogger("gcsfs").level == logging.NOTSET:
        logging.getLogger("gcsfs").setLevel(logging.CRITICAL)  # it logs a traceback for each error that it raises
    return fsspec.filesystem(protocol, use_listings_cache=False, skip_instance_cache=True, **options)


def translate(error: Exception, address: RemoteAddress) -> RemoteStoreError:
    """Translate an error of a library into a `RemoteStoreError`."""
    if isinstance(error, RemoteStoreError):
        return error
    if isinstance(error, ImportError):
        package = _PACKAGES[address.scheme]
        return RemoteStoreError(
            f"{address}: {address.scheme}:// needs {package}",
            hint="pip install 'graphkiln[remote]', or the image of the target `remote`",
        )
    names = {kind.__name__ for cause in causes_of(error) for kind in type(cause).__mro__}
    status, credentials = _status(error), _CREDENTIALS[address.scheme]
    words, hint, passing = redact(" ".join(f"{type(error).__name__}: {error}".split())), "", True
    if names & _NO_CREDENTIALS:
        words, hint, passing = "no credentials were found", credentials, False
    elif names & _DENIED or status in {401, 403}:
        words, hint, passing = "access is denied", f"may these credentials read it? {credentials}", False
    elif names & _ABSENT or status == 404:
        words, hint, passing = "there is no such bucket, folder or file", "check its spelling", False
    elif names & _INVALID:
        hint, passing = "check its spelling", False
    elif found := _DISTRUST.search(words):
        words = f"its certificate is not trusted: {found[1]}"
        hint = f"{_AUTHORITIES.get(address.scheme, 'SSL_CERT_FILE')} names a file with the authorities that are"
    elif "WRONG_VERSION_NUMBER" in words:
        words, hint = "does not speak TLS", f"{address.scheme}://http://HOST:PORT/... connects without it"
    elif names & _UNREACHABLE:
        words = f"cannot be reached ({type(error).__name__})"
        hint = "check the network and the address; behind a proxy, set HTTPS_PROXY"
    return RemoteStoreError(f"{address}: {words[:_WORDS]}", hint=hint, passing=passing)


def causes_of(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _status(error: Exception) -> int | None:
    """HTTP status of an error of these libraries."""
    for source in (error, getattr(error, "response", None)):
        for name in ("status_code", "status", "code"):
            value = getattr(source, name, None)
            if isinstance(value, int):
                return value
    return None


def _is_local(error: OSError) -> bool:
    """True for errors of the local disk; remote errors have no such code."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EMFILE, errno.EACCES} and (
        error.filename is not None or error.errno in {errno.ENOSPC, errno.EDQUOT}
    )


def _stamp_of(details: Mapping[str, Any]) -> str:
    for key in _STAMP_KEYS:
        if details.get(key):
            return str(details[key]).strip('"')
    moment = next((details[key] for key in ("LastModified", "last_modified", "mtime", "created") if key in details), "")
    return f"{moment} {details.get('size')}"


def _is_wanted(path: str) -> bool:
    """False for hidden names and for paths that leave the folder."""
    parts = path.split("/")
    if any(part in {"", ".", ".."} or "\\" in part or not part.isprintable() for part in parts):
        if not path.endswith("/"):  # placeholders of empty folders
            _log.warning("%r is not copied: its name is not a valid path", path)
        return False
    return not any(part.startswith(".") for part in parts)


def call_each(call: Callable[[_Item], object], items: Iterable[_Item], at_once: int) -> None:
    """Call a function with each item, in daemon threads.

    `concurrent.futures` would wait at the exit of Python for all queued calls: a server that is stopped while it copies
    a store would be killed before.

    Args:
        call: The function.
        items: Its arguments.
        at_once: Number of threads.

    Raises:
        BaseException: The first error of a call, after running calls have ended; no further calls start. Exceptions of
            signal handlers end the wait at once.
    """
    waiting: SimpleQueue[_Item] = SimpleQueue()
    for item in items:
        waiting.put(item)
    failed: list[BaseException] = []
    ended: SimpleQueue[None] = SimpleQueue()

    def work() -> None:
        try:
            with suppress(Empty):
                while not failed:
                    item = waiting.get_nowait()
                    call(item)
        except BaseException as error:
            failed.append(error)
        ended.put(None)

    for _ in range(at_once):
        threading.Thread(target=work, name="side-by-side", daemon=True).start()
    try:
        for _ in range(at_once):
            ended.get()
    except BaseException as stopped:
        failed.append(stopped)
        raise
    if failed:
        raise failed[0]
