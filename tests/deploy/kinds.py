"""Render manifests with the real kustomize and validate objects as strictly as an API server."""

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

# Versions of Kubernetes: the oldest with all fields in use, and the newest with installed schemas.
VERSIONS = ("1.27", "1.37")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_CRDS = Path(__file__).parent / "crds"


def _kubectl_problem() -> str | None:
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


_PROBLEM = _kubectl_problem()
needs_kubectl = pytest.mark.skipif(_PROBLEM is not None, reason=str(_PROBLEM))


def kustomize(folder: Path) -> list[Manifest]:
    """Objects of an overlay, as `kubectl apply -k` sends them."""
    return [each for each in yaml.load_all(_rendered(folder), Loader=_LOADER) if each]


@cache
def _rendered(folder: Path) -> str:
    done = subprocess.run(["kubectl", "kustomize", folder], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def only(manifests: list[Manifest], kind: str) -> Manifest:
    """The only object of a kind."""
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found


def check(manifest: Manifest) -> None:
    """Validate an object with the schema of its kind, and the pods in it with that of a Pod.

    Raises:
        jsonschema.ValidationError: A key is unknown, is missing, or has a value of another type.
        kubernetes_validate.ValidationError: The same, for a kind of Kubernetes.
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
    """Validator of a custom resource."""
    return jsonschema.Draft7Validator(json.loads((_CRDS / f"{kind}.json").read_text())["schema"])


def _check_core(manifest: Manifest) -> None:
    _check_text(json.dumps(manifest, sort_keys=True))


@cache
def _check_text(manifest: str) -> None:
    """Validate a distinct object once: most are the same in all overlays, and schemas load slowly."""
    for version in VERSIONS:
        kubernetes_validate.validate(json.loads(manifest), version, strict=True)


def pods(node: Any) -> Iterator[Manifest]:
    """Specifications of pods within a custom resource, with the keys of a pod only."""
    names = ("containers", "initContainers", "volumes", "securityContext", "serviceAccountName")
    for pod in with_containers(node):
        yield {name: pod[name] for name in names if name in pod}


def with_containers(node: Any) -> Iterator[Manifest]:
    """Parts of a manifest that have containers."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from with_containers(value)
    elif isinstance(node, list):
        for value in node:
            yield from with_containers(value)
