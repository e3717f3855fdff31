"""Pods satisfy Kubernetes' profile `restricted`, which a namespace may enforce. Source: "Pod Security Standards"."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kinds import kustomize, needs_kubectl, with_containers
from test_manifests import KUSTOMIZATIONS

Pod = dict[str, Any]
VOLUMES = {
    "configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret",
}  # fmt: skip


def violations(pod: Pod) -> Iterator[str]:
    """Violations of the profile `restricted` in a pod's specification."""
    yield from (name for name in ("hostNetwork", "hostPID", "hostIPC") if pod.get(name))
    yield from (each["name"] for each in pod.get("volumes", ()) if not VOLUMES & each.keys())
    shared = pod.get("securityContext", {})
    yield from (name for name in ("sysctls", "seLinuxOptions", "windowsOptions", "appArmorProfile") if shared.get(name))
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container.get("securityContext", {})
        both = {**shared, **own}
        if both.get("runAsNonRoot") is not True:
            yield "runAsNonRoot"
        if both.get("runAsUser") == 0:
            yield "runAsUser"
        if both.get("seccompProfile", {}).get("type") not in {"RuntimeDefault", "Localhost"}:
            yield "seccompProfile"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield "allowPrivilegeEscalation"
        capabilities = own.get("capabilities", {})
        if capabilities.get("drop") != ["ALL"] or set(capabilities.get("add", ())) - {"NET_BIND_SERVICE"}:
            yield "capabilities"
        if own.get("procMount", "Default") != "Default":
            yield "procMount"
        if any(port.get("hostPort") for port in container.get("ports", ())):
            yield "hostPort"


@needs_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZATIONS)
def test_serving(repository: Path, folder: str) -> None:
    found = [pod for each in kustomize(repository / "deploy" / folder) for pod in with_containers(each)]
    assert found
    assert [list(violations(pod)) for pod in found] == [[]] * len(found)


def test_scoring(repository: Path) -> None:
    manifests = list(yaml.safe_load_all((repository / "deploy/score/rayjob.yaml").read_text()))
    found = [pod for each in manifests for pod in with_containers(each)]
    assert [list(violations(pod)) for pod in found] == [[], [], []]  # head, workers, submitter
    assert [pod["automountServiceAccountToken"] for pod in found] == [False] * 3


def test_the_manuals_pod_that_copies_models(repository: Path) -> None:
    (text,) = re.findall(r"--overrides='(.*?)'", (repository / "docs" / "deploying.md").read_text(), re.DOTALL)
    assert list(violations(json.loads(text)["spec"])) == []


Change = Callable[[Pod, Pod], object]


@pytest.mark.parametrize(
    ("change", "violation"),
    [
        (lambda pod, _: pod.update(hostNetwork=True), "hostNetwork"),
        (lambda pod, _: pod["volumes"].append({"name": "host", "hostPath": {"path": "/"}}), "host"),
        (lambda pod, _: pod["securityContext"].pop("seccompProfile"), "seccompProfile"),
        (lambda pod, _: pod["securityContext"].pop("runAsNonRoot"), "runAsNonRoot"),
        (lambda _, one: one["securityContext"].update(runAsUser=0), "runAsUser"),
        (lambda _, one: one["securityContext"].pop("allowPrivilegeEscalation"), "allowPrivilegeEscalation"),
        (lambda _, one: one["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]), "capabilities"),
        (lambda _, one: one["ports"][0].update(hostPort=8000), "hostPort"),
    ],
)
def test_violations_are_found(repository: Path, change: Change, violation: str) -> None:
    base = yaml.safe_load((repository / "deploy/kubernetes/base/deployment.yaml").read_text())
    pod = copy.deepcopy(base["spec"]["template"]["spec"])
    assert list(violations(pod)) == []
    change(pod, pod["containers"][0])
    assert list(violations(pod)) == [violation]
