"""Renders manifests with the real kustomize and holds each object to its schema, as strictly as an API server would."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

Manifest = dict[str, Any]

VERSIONS = ("1.27", "1.37")
"""Of Kubernetes: the oldest that has every field that is used, and the newest whose schemas are installed."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CRDS = Path(__file__).parent / "crds"


def _what_kubectl_lacks() -> str | None:
    if shutil.which("kubectl") is None:
        return (
            "no kubectl on this machine: apt-get install kubernetes-client, or https://kubernetes.io/docs/tasks/tools"
        )
    shown = subprocess.run(
        ["kubectl", "version", "--client", "-o", "json"], capture_output=True, text=True, check=False
    )
    if shown.returncode == 0 and "kustomizeVersion" in json.loads(shown.stdout):
        return None
    return "this kubectl is too old for components of kustomize: 1.24 or newer is needed (Debian 12 has 1.20)"


_LACK = _what_kubectl_lacks()
needs_kubectl = pytest.mark.skipif(_LACK is not None, reason=str(_LACK))


def kustomize(folder: Path) -> list[Manifest]:
    """The objects of an overlay, as `kubectl apply -k` would send them."""
    return [each for each in yaml.load_all(_rendered(folder), Loader=_LOADER) if each]


@cache
def _rendered(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The one object of a kind."""
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


def check(manifest: Manifest) -> None:
    """Holds an object to the schema of its kind, and the pods within it to that of a Pod.

    Raises:
        jsonschema.ValidationError: A key is unknown, is missing, or has a value of another type.
        kubernetes_validate.ValidationError: The same, of one of Kubernetes' own kinds.
    """
    path = _CRDS / f"{manifest['kind']}.json"
    if not path.exists():
        _check_core(manifest)
        return
    definition = json.loads(path.read_text())
    assert manifest["apiVersion"] == f"{definition['group']}/{definition['version']}"
    validator(manifest["kind"]).validate(manifest)
    for pod in pods(manifest["spec"]):
        _check_core({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod})


@cache
def validator(kind: str) -> jsonschema.Draft7Validator:
    """Of a custom resource."""
    return jsonschema.Draft7Validator(json.loads((_CRDS / f"{kind}.json").read_text())["schema"])


def _check_core(manifest: Manifest) -> None:
    _check_text(json.dumps(manifest, sort_keys=True))


@cache
def _check_text(manifest: str) -> None:
    """Once for each object: most are the same in all overlays, and a schema takes a moment to load."""
    for version in VERSIONS:
        kubernetes_validate.validate(json.loads(manifest), version, strict=True)


def pods(node: Any) -> Iterator[Manifest]:
    """The specifications of pods within a custom resource, without what is not a pod's."""
    names = ("containers", "initContainers", "volumes", "securityContext", "serviceAccountName")
    for pod in with_containers(node):
        yield {name: pod[name] for name in names if name in pod}


def with_containers(node: Any) -> Iterator[Manifest]:
    """Everything within a manifest that has containers."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from with_containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from with_containers(value)
