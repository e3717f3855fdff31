"""The autoscalers: both follow the same two figures, and a steady load ends in a steady fleet."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_server import needs_promtool
from test_rules import known_metrics, metrics_of

# Value of a metric for a pod, from its load (a share of its capacity) and its queued requests.
Metric = Callable[[float, float], float]

# Tolerance of the autoscaler: a smaller difference has no effect. Source: Kubernetes, "Horizontal Pod Autoscaling".
TOLERANCE = 0.1
# Period of the rules for scaling up.
STEP_S = 30
# Requests a second of a busy pod: ResNet-50 on two cores, docs/benchmarks/serving.json.
RATE = 15.0


@pytest.fixture(scope="module")
def components(repository: Path) -> Path:
    return repository / "deploy" / "kubernetes" / "components"


@pytest.fixture(scope="module")
def hpa(components: Path) -> dict[str, Any]:
    return yaml.safe_load((components / "hpa" / "hpa.yaml").read_text())["spec"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def scaled(components: Path) -> dict[str, Any]:
    text = (components / "keda" / "scaledobject.yaml").read_text()
    return yaml.safe_load(text)["spec"]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def adapter(components: Path) -> dict[str, str]:
    """Queries of the adapter by metric."""
    values = yaml.safe_load((components / "hpa" / "adapter-values.yaml").read_text())
    return {rule["name"]["as"]: rule["metricsQuery"] for rule in values["rules"]["custom"]}


def targets(hpa: Mapping[str, Any]) -> dict[str, float]:
    """Targets of the autoscaler by metric, on average per pod."""
    named = {each["pods"]["metric"]["name"]: each["pods"]["target"]["averageValue"] for each in hpa["metrics"]}
    return {name: float(text.removesuffix("m")) / (1000 if text.endswith("m") else 1) for name, text in named.items()}


def waiting(load: float, piled_up: float) -> float:
    """Mean queue of a server with constant times and random arrivals (M/D/1), and the backlog."""
    return piled_up + (load**2 / (2 * (1 - load)) if load < 1 else 0.0)


def busy(load: float, _: float) -> float:
    return min(1.0, load)


METRICS: dict[str, Metric] = {"graphkiln_queue_seconds_per_second": waiting, "graphkiln_instances_busy": busy}


def wanted(pods: int, metrics: Mapping[str, float], aims: Mapping[str, float]) -> int:
    """Number of pods that the autoscaler computes from averages per pod. Source: Kubernetes, "Algorithm details"."""
    ratios = [value / aims[name] for name, value in metrics.items()]
    return max(pods if abs(ratio - 1) <= TOLERANCE else math.ceil(pods * ratio) for ratio in ratios)


def scale(load: float, hpa: Mapping[str, Any], metrics: Mapping[str, Metric], minutes: int) -> list[tuple[int, float]]:
    """Simulate pods and the load of each over time, for a load in units of pods.

    A new pod serves at the next step; the manifest limits the speed of scaling.
    """
    up, down = hpa["behavior"]["scaleUp"]["policies"], hpa["behavior"]["scaleDown"]
    window = down["stabilizationWindowSeconds"] // STEP_S
    pods, piled_up = int(hpa["minReplicas"]), 0.0
    asked: list[int] = []
    history: list[tuple[int, float]] = []
    for _ in range(minutes * 60 // STEP_S):
        piled_up = max(0.0, piled_up + (load - pods) * RATE * STEP_S)
        figures = {name: metric(load / pods, piled_up / pods) for name, metric in metrics.items()}
        asked.append(min(max(wanted(pods, figures, targets(hpa)), hpa["minReplicas"]), hpa["maxReplicas"]))
        history.append((pods, load / pods))
        if asked[-1] > pods:
            pods = min(asked[-1], max(_more(pods, policy) for policy in up))
        elif len(history) * STEP_S % down["policies"][0]["periodSeconds"] == 0:
            pods = max(*asked[-window:], pods - down["policies"][0]["value"]) if len(asked) >= window else pods
            pods = min(pods, history[-1][0])
    return history


def _more(pods: int, policy: Mapping[str, Any]) -> int:
    """Largest number of pods that a policy allows after a step."""
    more = pods * policy["value"] / 100 if policy["type"] == "Percent" else policy["value"]
    return pods + math.ceil(more * STEP_S / policy["periodSeconds"])


@pytest.mark.parametrize("load", [0.2, 0.9, 1.5, 1.8, 2.2, 2.7, 3.4, 4.1, 5.0, 6.3])
def test_a_steady_load_ends_in_a_steady_fleet_that_is_not_overloaded(hpa: dict[str, Any], load: float) -> None:
    last_hour = scale(load, hpa, METRICS, minutes=180)[-120:]
    (pods,) = {pods for pods, _ in last_hour}
    assert load / pods <= targets(hpa)["graphkiln_instances_busy"] * (1 + TOLERANCE)
    assert pods == hpa["minReplicas"] or load / (pods - 1) > 0.5, "more pods than the load can keep busy"


def test_the_queue_alone_would_oscillate(hpa: dict[str, Any]) -> None:
    alone = {name: metric for name, metric in METRICS.items() if "queue" in name}
    last_hour = scale(1.8, hpa, alone, minutes=180)[-120:]
    assert len({pods for pods, _ in last_hour}) > 1
    assert max(load for _, load in last_hour) > 0.85


def test_a_burst_at_most_doubles_the_fleet_in_a_step(hpa: dict[str, Any]) -> None:
    fleet = [pods for pods, _ in scale(9.0, hpa, METRICS, minutes=10)]
    assert max(fleet) == hpa["maxReplicas"]
    assert all(later <= 2 * earlier for earlier, later in pairwise(fleet))


def test_keda_has_the_same_targets_and_speed(hpa: dict[str, Any], scaled: dict[str, Any]) -> None:
    assert [float(trigger["metadata"]["threshold"]) for trigger in scaled["triggers"]] == list(targets(hpa).values())
    assert scaled["advanced"]["horizontalPodAutoscalerConfig"]["behavior"] == hpa["behavior"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (hpa["minReplicas"], hpa["maxReplicas"])
    assert all(trigger["metadata"]["ignoreNullValues"] == "false" for trigger in scaled["triggers"])


def test_the_adapter_has_the_metrics_of_the_hpa(hpa: dict[str, Any], adapter: dict[str, str]) -> None:
    assert adapter.keys() == targets(hpa).keys() == METRICS.keys()


def test_the_queries_use_known_metrics(adapter: dict[str, str], scaled: dict[str, Any], repository: Path) -> None:
    queries = [*adapter.values(), *(trigger["metadata"]["query"] for trigger in scaled["triggers"])]
    asked = set[str]().union(*(metrics_of(query.replace("<<.GroupBy>>", "pod")) for query in queries))
    assert len(asked) == 5
    assert asked <= known_metrics(repository)


@needs_promtool
def test_the_queries_compute_queued_requests_and_busy_instances(
    adapter: dict[str, str], scaled: dict[str, Any], tmp_path: Path
) -> None:
    """Pod a computes 25 batches of 4 a second, each in 20 ms, while 1.5 requests wait.

    Other models and pods, and the next version of the same model, are idle.
    """
    waits, works = (trigger["metadata"]["query"] for trigger in scaled["triggers"])
    asked = [(waits, [("{}", 1.5)]), (works, [("{}", 0.5)])]
    for name, (a, b) in {"graphkiln_queue_seconds_per_second": (1.5, 0), "graphkiln_instances_busy": (0.5, 0)}.items():
        query = adapter[name].replace("<<.GroupBy>>", "pod").replace("<<.LabelMatchers>>", 'namespace="models"')
        asked.append((query, [('{pod="a"}', a), ('{pod="b"}', b)]))
    series = [
        *_series("a", "m", requests=100, batches=25, queue_us=1_500_000, compute_us=2_000_000),
        *_series("a", "m", requests=0, batches=0, queue_us=0, compute_us=0, version="2"),
        *_series("a", "idle", requests=0, batches=0, queue_us=0, compute_us=0),
        *_series("b", "m", requests=0, batches=0, queue_us=0, compute_us=0),
        *_series("a", "m", requests=9, batches=9, queue_us=90_000_000, compute_us=9_000_000, namespace="others"),
    ]
    tests = tmp_path / "tests.yml"
    expected = [
        {
            "expr": f"round({query}, 0.001)",
            "eval_time": "10m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
        }
        for query, samples in asked
    ]
    tests.write_text(json.dumps({"tests": [{"interval": "15s", "input_series": series, "promql_expr_test": expected}]}))
    done = subprocess.run(["promtool", "test", "rules", tests], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _series(
    pod: str,
    model: str,
    *,
    requests: int,
    batches: int,
    queue_us: int,
    compute_us: int,
    namespace: str = "models",
    version: str = "1",
) -> list[dict[str, str]]:
    """Counters of a version in a pod with rates per second, and its instance."""
    counters = {
        "nv_inference_request_success": requests,
        "nv_inference_exec_count": batches,
        "nv_inference_queue_duration_us": queue_us,
        "nv_inference_compute_infer_duration_us": compute_us,
    }
    labels = f'{{namespace="{namespace}",service="graphkiln",pod="{pod}",model="{model}",version="{version}"}}'
    counted = [{"series": f"{name}{labels}", "values": f"0+{15 * each}x60"} for name, each in counters.items()]
    return [*counted, {"series": f"graphkiln_instance_info{labels}", "values": "1x60"}]


def test_the_manual_has_the_measured_figures(repository: Path) -> None:
    rows = json.loads((repository / "docs" / "benchmarks" / "serving.json").read_text())["rows"]
    measured = {row["model"]: row for row in rows if row["set-up"] == "graphkiln"}
    text = (repository / "docs" / "deploying.md").read_text()
    rows_of_manual = re.findall(
        r"^\| ([a-z0-9-]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.MULTILINE
    )
    assert len(rows_of_manual) == 4
    for model, callers, *figures in rows_of_manual:
        row = measured[f"{model}, HTTP, {callers}"]
        rate = row["requests/s"]
        waits, works = rate * row["queue us"] / 1e6, rate * row["infer us"] / 1e6 / row["batch"]
        assert figures == [f"{rate:.1f}", f"{row['p99 ms']:.1f}", f"{waits:.2f}", f"{works:.2f}"]
