"""docs/scoring.md says what there is: flags, metrics, keys, and files that Ray and KubeRay take."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from typer.main import get_command

import graphkiln
from graphkiln.cli.main import app
from graphkiln.scoring.metrics import COUNTERS, GAUGES, UNIT_SECONDS
from graphkiln.scoring.run_state import Progress, WorkerProgress

# Of `RayJobSpec` and below it, as KubeRay's API reference (ray.io/v1) lists them.
RAY_JOB_KEYS = {
    "backoffLimit",
    "entrypoint",
    "rayClusterSpec",
    "shutdownAfterJobFinishes",
    "submitterPodTemplate",
    "ttlSecondsAfterFinished",
}
CLUSTER_KEYS = {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
GROUP_KEYS = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}


@pytest.fixture(scope="module")
def manual(repository: Path) -> str:
    return (repository / "docs" / "scoring.md").read_text()


@pytest.fixture(scope="module")
def flags() -> set[str]:
    commands: dict[str, Any] = get_command(app).commands  # type: ignore[attr-defined]
    return {name for parameter in commands["score"].params for name in parameter.opts if name.startswith("--")}


def read_yaml(repository: Path, name: str) -> Any:
    return list(yaml.safe_load_all((repository / "deploy" / "score" / name).read_text()))[-1]


def test_named_flags_exist(manual: str, flags: set[str]) -> None:
    of_others = {"--metrics-export-port", "--dereference", "--hard-dereference"}  # of Ray, of tar
    assert set(re.findall(r"--[a-z][a-z-]+", manual)) - of_others - flags == set()


def test_every_flag_is_documented(manual: str, flags: set[str]) -> None:
    known_by_their_help = {"--workers", "--cache"}
    assert {flag for flag in flags - known_by_their_help if flag not in manual} == set()


@pytest.mark.parametrize("kind", [Progress, WorkerProgress])
def test_every_key_of_progress_is_documented(kind: type[Progress | WorkerProgress], manual: str) -> None:
    assert [field.name for field in fields(kind) if f"`{field.name}`" not in manual] == []


def test_every_metric_is_documented(manual: str) -> None:
    names = {*COUNTERS, *GAUGES, UNIT_SECONDS}
    assert set(re.findall(r"`(graphkiln_score_\w+)`", manual)) == names
    for _, labels in COUNTERS.values():
        assert all(f"`{label}`" in manual for label in labels)


def test_every_python_function_is_documented(manual: str) -> None:
    assert all(f"`{name}`" in manual for name in graphkiln.scoring.__all__)


def test_cluster_launcher_file_is_valid(repository: Path) -> None:
    import ray

    schema = json.loads((Path(ray.__file__).parent / "autoscaler" / "ray-schema.json").read_text())
    cluster = read_yaml(repository, "ray-up.yaml")
    jsonschema.validate(cluster, schema)
    assert cluster["head_node_type"] in cluster["available_node_types"]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**cluster, "max_worker": 2}, schema)


def test_kuberay_job_has_known_fields(repository: Path, flags: set[str]) -> None:
    job = read_yaml(repository, "rayjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert set(spec) <= RAY_JOB_KEYS
    assert set(spec["rayClusterSpec"]) <= CLUSTER_KEYS
    assert set(spec["rayClusterSpec"]["headGroupSpec"]) <= GROUP_KEYS
    for group in spec["rayClusterSpec"]["workerGroupSpecs"]:
        assert set(group) == GROUP_KEYS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
    words = spec["entrypoint"].split()
    assert words[:2] == ["graphkiln", "score"]
    assert {word for word in words if word.startswith("--")} <= flags


def test_ray_version_matches_the_image(repository: Path) -> None:
    image = (repository / "deploy" / "score" / "Dockerfile").read_text()
    version = read_yaml(repository, "rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"]
    assert f"FROM rayproject/ray:{version}-" in image
