"""Model stores as OCI artifacts in a container registry: each file is a layer, which is annotated with its path.

Artifacts of CNCF ModelPack, as `graphkiln push` and others write them, and any other artifact whose layers have titles:
those of oras, and those that graphkiln wrote before.

Reading has the part of fsspec's interface that `storage.files` uses: a listing with the layers' digests as ETags, and
files that are checked against their digest. If a tag moves in between, the listed content is fetched.

oras-py implements the protocol, with tokens and Docker's credentials. Its retries are bypassed, because they wait two
minutes without an answer; a server polls its stores anyway.

Source: OCI Image Format, "Image Manifest Specification" and "Pre-Defined Annotation Keys"; OCI Distribution, "API".
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from graphkiln_backend.graph.manifest import sha256_of
from graphkiln_backend.storage.address import OCI_REFERENCE, RemoteStoreError

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
TITLE = "org.opencontainers.image.title"
FILEPATH = "org.cncf.model.filepath"  # ModelPack, "Annotations"
_ARCHIVE = re.compile(r"application/vnd\.(cncf\.model|kitops)\..*\.tar(\+\w+)?")
_TIMEOUTS_S = (10, 60)
# Limit of registries. Source: OCI Distribution, "Pushing Manifests".
_LONGEST_MANIFEST = 4 << 20
_BLOCK = 1 << 20


class OciRegistry:
    """Requests to the registry of an artifact. The first request opens a connection.

    Methods also raise errors of oras and requests: see `storage.files.translate`.

    Args:
        artifact: `HOST/REPOSITORY:TAG` or `HOST/REPOSITORY@sha256:...`.
        protocol: `https`, or `http`.

    Raises:
        ImportError: oras is not installed.
    """

    def __init__(self, artifact: str, protocol: str) -> None:
        from oras.container import Container
        from oras.provider import Registry

        # oras treats a host without a dot or port as part of the repository's name, and uses Docker Hub.
        host, _, name = artifact.partition("/")
        self.container: Any = Container(f"localhost:0/{name}")
        self.container.registry = host
        self._registry: Any = Registry(insecure=protocol == "http")
        self._registry.session.request = partial(self._registry.session.request, timeout=_TIMEOUTS_S)
        self._once = partial(Registry.do_request.__wrapped__, self._registry)
        self._registry.do_request = self._request
        auth = self._registry.auth
        auth.authenticate_request = partial(_authenticate, auth, auth.authenticate_request)
        folder = os.environ.get("DOCKER_CONFIG")  # oras reads the file in the home folder only
        auth.load_configs(self.container, [str(Path(folder) / "config.json")] if folder else [])

    def manifest(self) -> bytes:
        """Fetch the artifact's manifest.

        Raises:
            RemoteStoreError: It is too large.
        """
        response = self._request(self._url(self.container.manifest_url()), headers={"Accept": MANIFEST_TYPE})
        response.raise_for_status()
        content: bytes = response.content
        if len(content) > _LONGEST_MANIFEST:
            raise RemoteStoreError(f"{self.container}: its manifest has {len(content)} bytes")
        return content

    def fetch(self, digest: str, target: Path) -> None:
        """Fetch a blob and check its digest.

        Raises:
            RemoteStoreError: The digest does not match, or the blob is missing.
            OSError: The blob cannot be written.
        """
        with self._request(self._url(self.container.get_blob_url(digest)), stream=True) as response:
            if response.status_code == 404:
                raise RemoteStoreError(
                    f"{self.container}: the registry has lost {digest}, which its manifest names",
                    hint="push it again: graphkiln push STORE ADDRESS",
                    passing=True,
                )
            response.raise_for_status()
            seen = hashlib.sha256()
            with target.open("wb") as file:
                for block in response.iter_content(_BLOCK):
                    seen.update(block)
                    file.write(block)
        if f"sha256:{seen.hexdigest()}" != digest:
            raise RemoteStoreError(f"{self.container}: the registry sent other bytes than {digest}", passing=True)

    def upload(self, path: Path, digest: str, size: int) -> None:
        """Upload a blob if the registry does not have it."""
        self._registry.upload_blob(str(path), self.container, {"digest": digest, "size": size}).raise_for_status()

    def publish(self, manifest: bytes) -> None:
        """Upload a manifest under the artifact's tag, after its blobs."""
        url, headers = self._url(self.container.manifest_url()), {"Content-Type": MANIFEST_TYPE}
        self._request(url, method="PUT", data=manifest, headers=headers).raise_for_status()

    def _url(self, path: str) -> str:
        return f"{self._registry.prefix}://{path}"

    def _request(self, *arguments: Any, **options: Any) -> Any:
        try:
            response = self._once(*arguments, **options)
        except ValueError as error:  # oras has no valid credentials
            if "authentication" in str(error):
                raise PermissionError(str(error)) from error
            raise
        if response.status_code in (401, 403):
            raise PermissionError(f"{response.status_code} {response.reason}")
        return response


def _authenticate(auth: Any, by_token: Any, response: Any, headers: dict[str, str], refresh: bool = False) -> Any:
    """Answer a registry's challenge; return headers, and whether they are an answer.

    oras supports tokens only; registries may use basic authentication (RFC 7617).
    """
    if not response.headers.get("Www-Authenticate", "").lower().startswith("basic"):
        return by_token(response, headers, refresh)
    password = getattr(auth, "_basic_auth", "")
    return {**headers, "Authorization": f"Basic {password}"}, bool(password)


class OciFileSystem:
    """Files of the artifacts of one registry, with the methods of fsspec that `storage.files` calls.

    Args:
        protocol: `https`, or `http`.
    """

    def __init__(self, protocol: str) -> None:
        self._protocol = protocol
        self._registries: dict[str, OciRegistry] = {}
        self._digests: dict[str, str] = {}

    def invalidate_cache(self) -> None:
        """Do nothing: listings are not cached."""

    def find(self, root: str, *, detail: bool = True) -> dict[str, Mapping[str, Any]]:
        """List the files below an artifact, or below a folder of it.

        Args:
            root: `HOST/REPOSITORY:TAG`, and a path in it.
            detail: As in fsspec; sizes and digests are always included.

        Raises:
            RemoteStoreError: It is not an artifact of files, or not the pinned one.
        """
        del detail
        artifact, path = split_root(root)
        content = self._registry(artifact).manifest()
        pinned = artifact.partition("@")[2]
        if pinned and pinned != digest_of(content):
            raise RemoteStoreError(
                f"{artifact}: the registry sent another manifest, {digest_of(content)}", passing=True
            )
        found = {f"{artifact}/{title}": layer for title, layer in read_layers(content, artifact)}
        self._digests |= {name: str(layer["digest"]) for name, layer in found.items()}
        prefix = f"{artifact}/{path}/" if path else f"{artifact}/"
        return {
            name: {"type": "file", "size": int(layer["size"]), "ETag": layer["digest"]}
            for name, layer in found.items()
            if name.startswith(prefix) or name == root
        }

    def get_file(self, name: str, target: str) -> None:
        """Fetch a listed file.

        Raises:
            FileNotFoundError: There is no such file.
            RemoteStoreError: The content has another digest.
        """
        if name not in self._digests:
            self.find(name)
        if name not in self._digests:
            raise FileNotFoundError(name)
        self._registry(split_root(name)[0]).fetch(self._digests[name], Path(target))

    def _registry(self, artifact: str) -> OciRegistry:
        if artifact not in self._registries:
            self._registries[artifact] = OciRegistry(artifact, self._protocol)
        return self._registries[artifact]


def read_layers(content: bytes, artifact: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Read path and descriptor of each file from a manifest.

    Args:
        content: The manifest.
        artifact: Name for messages.

    Raises:
        RemoteStoreError: It is not a manifest of files.
    """
    what, kinds, named, valid = "its manifest is damaged", set(), [], False
    with suppress(ValueError, TypeError, KeyError, AttributeError, RecursionError):
        manifest = json.loads(content)
        config = manifest.get("config") or {}
        kind = manifest.get("artifactType") or config.get("mediaType") or manifest.get("mediaType") or "unknown"
        what = f"its type is {kind}"
        layers = [(layer, layer.get("annotations") or {}) for layer in manifest["layers"]]
        kinds = {str(layer.get("mediaType")) for layer, _ in layers}
        named = [(str(path), layer) for layer, notes in layers if (path := notes.get(FILEPATH) or notes.get(TITLE))]
        valid = all(re.fullmatch("sha256:[0-9a-f]{64}", layer["digest"]) and layer["size"] >= 0 for _, layer in named)
    if archives := sorted(filter(_ARCHIVE.fullmatch, kinds)):
        raise RemoteStoreError(
            f"oci://{artifact} has archives ({', '.join(archives)}), expected files as they are",
            hint="modctl build --raw, or graphkiln push",
        )
    if not named or not valid:
        raise RemoteStoreError(
            f"oci://{artifact} is not an artifact with files: {what}",
            hint=f"graphkiln push STORE oci://{artifact} makes one",
        )
    return named


def split_root(root: str) -> tuple[str, str]:
    """Split a root into the artifact and the path in it.

    Raises:
        RemoteStoreError: It does not name an artifact.
    """
    found = OCI_REFERENCE.fullmatch(root)
    if not found:
        raise RemoteStoreError(f"oci://{root} is not an artifact", hint="oci://HOST/REPOSITORY:TAG")
    return found["artifact"], (found["path"] or "").strip("/")


def digest_of(content: bytes) -> str:
    """Digest of bytes in registry notation."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def digest_of_file(path: Path) -> str:
    """Digest of a file in registry notation.

    Raises:
        OSError: The file cannot be read.
    """
    return f"sha256:{sha256_of(path)}"
