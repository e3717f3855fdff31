"""Metrics of a real server for a real Prometheus and the dashboard, and traces for a collector."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import pytest
import yaml
from otel_collector import Collector, attributes
from prometheus_server import PrometheusServer, needs_prometheus
from running import Server, Serving

import graphkiln
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_client import Client

pytestmark = pytest.mark.server

_TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
_PARENT = "00f067aa0ba902b7"
_DEADLINE_S = 120
_PNG = (Path(__file__).parents[2] / "docs" / "digits" / "seven.png").read_bytes()
# Prefixes of metrics that this server does not have, with their requirement.
_NEEDS = {
    "nv_gpu_": "a GPU",
    "nv_energy_consumption": "a GPU",
    "graphkiln_version_refused": "a refused version",
}


def _text(server: Server) -> str:
    with urlopen(f"http://127.0.0.1:{server.metrics_port}/metrics") as answer:
        return answer.read().decode()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory, digits: Path) -> Iterator[Server]:
    """A server with metrics as in docs/deploying.md; a model with images, and a rollout."""
    store = tmp_path_factory.mktemp("store")
    shutil.copytree(digits, store / "digits")
    with (store / "digits" / "config.pbtxt").open("a") as config:
        config.write(ACCEPT_IMAGES_LINE)
    state, record = tmp_path_factory.mktemp("state"), tmp_path_factory.mktemp("record")
    arguments = ("--metrics-config=summary_latencies=true", "--record", record, "--state", state)
    with Serving(tmp_path_factory.mktemp("serve"), "--model-store", store, *arguments) as server:
        server.wait_ready()
        shutil.copytree(store / "digits" / "1", store / "digits" / "2")
        graphkiln.rollout(store / "digits", state=state).start(2, shadow=1.0)
        yield server


def _ask(server: Server, seed: int, rows: int = 2) -> None:
    with Client(server.url) as client:
        image = np.random.default_rng(seed).random((rows, 1, 32, 32), np.float32)
        client.model("digits").infer({"INPUT_0": image})
        client.model("digits.images").infer({"IMAGE": np.array([[_PNG]], dtype=object)})  # or its quantiles are NaN


def _families(text: str) -> set[str]:
    """Names as in the table: those of histograms and summaries without suffixes."""
    names = set(re.findall(r"^([a-z_0-9]+)[{ ]", text, re.MULTILINE))
    return {re.sub(r"_(bucket|sum|count)$", "", n) if re.search(r"_summary_|batch_size_", n) else n for n in names}


def test_the_table_has_the_servers_metrics(watched: Server, repository: Path) -> None:
    section = (repository / "docs" / "metrics.md").read_text()
    documented = set(re.findall(r"^\| `([a-z_0-9]+)`", section, re.MULTILINE))
    needed = {name for name in documented if not any(name.startswith(each) for each in _NEEDS)}

    def has_all() -> bool:
        _ask(watched, 1)  # again, until some are compared with the candidate
        return needed <= _families(_text(watched))

    watched.wait_until(has_all, _DEADLINE_S)
    assert sorted(_families(_text(watched)) - documented) == [], "in no table"


@needs_prometheus
def test_all_queries_of_the_dashboard_have_results(watched: Server, repository: Path, tmp_path: Path) -> None:
    dashboard = json.loads((repository / "deploy" / "grafana" / "dashboard.json").read_text())
    asked = [(panel["title"], each) for panel in dashboard["panels"] for each in panel["targets"]]
    queries = {title if each["refId"] == "A" else f"{title} {each['refId']}": each["expr"] for title, each in asked}
    assert len(queries) == len(asked)
    configuration = repository / "deploy" / "prometheus" / "prometheus.yml"
    target = f"127.0.0.1:{watched.metrics_port}"
    with PrometheusServer(configuration, target, tmp_path) as prometheus:
        left, answers = dict(queries), {}
        end = time.monotonic() + _DEADLINE_S
        seed = 2
        while left:
            assert time.monotonic() < end, f"no figures for {left}"
            seed += 1
            _ask(watched, seed)  # rates need new requests
            for title, query in list(left.items()):
                values = _values(prometheus.get("query", query=_filled(query)))
                if values and not np.isnan(values).any():
                    answers[title] = values
                    del left[title]
        models = prometheus.get("label/model/values", **{"match[]": "graphkiln_version_proven"})
        assert models == ["digits", "digits.candidate"]  # values of the dashboard's variable
        assert _values(prometheus.get("query", query='up{job="graphkiln"}')) == [1]
        groups = {each["name"]: each for each in prometheus.get("rules")["groups"]}
        wanted = yaml.safe_load((configuration.parent / "rules.yml").read_text())["groups"]
        assert groups.keys() == {each["name"] for each in wanted}
    assert 0 < answers["Latency p50, of the slowest server"][0] <= answers["Latency p99, of the slowest server"][0] < 60
    assert 1 <= answers["Rows per run, mean"][0] <= 8
    assert answers["Errors, share of all requests"][0] == 0
    assert 0 < answers["Self-test: relative error on the golden samples"][0] < 1e-4


def _filled(query: str) -> str:
    """Fill in Grafana's variables."""
    return query.replace("$model", ".*").replace("$__rate_interval", "1m")


def _values(answer: dict[str, Any]) -> list[float]:
    return [float(each["value"][1]) for each in answer["result"]]


def test_a_trace_continues_that_of_the_caller(digits: Path, tmp_path: Path) -> None:
    """On a server with traces as in docs/deploying.md."""
    body = {"inputs": [{"name": "INPUT_0", "shape": [1, 1, 32, 32], "datatype": "FP32", "data": [0.5] * 1024}]}
    content = json.dumps({"id": "from-the-caller", **body}).encode()
    headers = {"Content-Type": "application/json", "traceparent": f"00-{_TRACE}-{_PARENT}-01"}
    with Collector() as collector:
        arguments = (
            "--trace-config=mode=opentelemetry",
            f"--trace-config=opentelemetry,url={collector.url}",
            "--trace-config=opentelemetry,resource=service.name=graphkiln",
            "--trace-config=opentelemetry,bsp_schedule_delay=200",
            "--trace-config=level=TIMESTAMPS",
            "--trace-config=rate=1",
        )

        def ours() -> dict[str, dict[str, Any]]:
            return {span["name"]: span for span in collector.spans if span["traceId"].lower() == _TRACE}

        with Serving(
            tmp_path, "--model-store", digits.parent, "--load-model=digits", "--model-control-mode=explicit", *arguments
        ) as server:
            server.wait_ready()
            with urlopen(Request(f"{server.url}/v2/models/digits/infer", content, headers)) as answer:
                assert json.load(answer)["id"] == "from-the-caller"
            server.wait_until(lambda: {"InferRequest", "digits", "compute"} <= ours().keys(), _DEADLINE_S)
        spans = ours()
    assert spans["InferRequest"]["parentSpanId"].lower() == _PARENT
    assert spans["InferRequest"]["resource"]["service.name"] == "graphkiln"
    assert spans["digits"]["parentSpanId"] == spans["InferRequest"]["spanId"]
    assert spans["compute"]["parentSpanId"] == spans["digits"]["spanId"]
    assert attributes(spans["digits"])["triton.model_name"] == "digits"
    assert attributes(spans["digits"])["triton.request_id"] == "from-the-caller"
    assert int(spans["compute"]["endTimeUnixNano"]) >= int(spans["compute"]["startTimeUnixNano"])
