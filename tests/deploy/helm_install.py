"""Install a chart by Helm into an API server that only records its requests. A program: JSON in, JSON out.

helm-sdkpy is the Go library of Helm 4. It has no `template`, but `helm install` sends what counts: objects rendered,
validated against the chart's schema, and mapped to the resources of an API server. The server here knows the kinds of
the chart and stores nothing.

Standard input: `{"chart": PATH, "cases": [VALUES, ...]}`; `name` among the values is that of the release. Standard
output: `{"lint": [...], "cases": [...]}`; a case is
`{"objects": [...]}` or `{"error": "..."}`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
import tempfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

HELM: Any = importlib.import_module("helm_sdkpy")
# Kinds by group and version, and by plural.
KINDS = {
    "v1": {
        "serviceaccounts": "ServiceAccount",
        "services": "Service",
        "configmaps": "ConfigMap",
        "secrets": "Secret",
        "persistentvolumeclaims": "PersistentVolumeClaim",
    },
    "apps/v1": {"deployments": "Deployment"},
    "policy/v1": {"poddisruptionbudgets": "PodDisruptionBudget"},
    "networking.k8s.io/v1": {"networkpolicies": "NetworkPolicy"},
    "autoscaling/v2": {"horizontalpodautoscalers": "HorizontalPodAutoscaler"},
    "keda.sh/v1alpha1": {"scaledobjects": "ScaledObject"},
    "monitoring.coreos.com/v1": {"servicemonitors": "ServiceMonitor", "prometheusrules": "PrometheusRule"},
}


def discovery(path: str) -> dict[str, Any] | None:
    """Discovery documents of an API server; None for any other path."""
    if path == "/version":
        return {"major": "1", "minor": "30", "gitVersion": "v1.30.0"}
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [each for each in KINDS if "/" in each]
        return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group_of(each) for each in groups]}
    return resources(path.removeprefix("/apis/").removeprefix("/api/"))


def group_of(version: str) -> dict[str, Any]:
    named = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [named], "preferredVersion": named}


def resources(version: str) -> dict[str, Any] | None:
    if version not in KINDS:
        return None
    verbs = ["create", "get", "list", "patch", "update", "delete"]
    found = [
        {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
        for plural, kind in KINDS[version].items()
    ]
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": version, "resources": found}


class Recorder(BaseHTTPRequestHandler):
    """Respond like an empty cluster."""

    protocol_version = "HTTP/1.1"
    created: list[dict[str, Any]]

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        known = discovery(path)
        if known is None and path.endswith("/secrets"):  # Helm looks for releases
            known = {"kind": "SecretList", "apiVersion": "v1", "metadata": {}, "items": []}
        if known is not None:
            return self._send(200, json.dumps(known).encode())
        missing = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
        return self._send(404, json.dumps(missing).encode())

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if not self.path.partition("?")[0].endswith("/secrets"):  # Helm's records of releases
            type(self).created.append(json.loads(body))
        self._send(201, body)

    def do_PUT(self) -> None:
        self._send(200, self.rfile.read(int(self.headers["Content-Length"])))

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", self.headers.get("Content-Type", "application/json"))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def kubeconfig(port: int) -> str:
    named = {"name": "recorder"}
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{**named, "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{**named, "user": {}}],
            "contexts": [{**named, "context": {"cluster": "recorder", "user": "recorder"}}],
            "current-context": "recorder",
        }
    )


async def install(chart: str, values: dict[str, Any], config: str) -> dict[str, Any]:
    """Objects that Helm creates for some values, or its error."""
    name = values.pop("name", "graphkiln")
    Recorder.created = []
    try:
        await HELM.Install(HELM.Configuration("models", config)).run(name, chart, values, wait=False)
    except HELM.HelmError as error:
        return {"error": str(error)}
    return {"objects": Recorder.created}


async def lint(chart: str, config: str) -> list[dict[str, Any]]:
    """Messages of `helm lint`."""
    return (await HELM.Lint(HELM.Configuration("models", config)).run(chart))["Messages"]  # type: ignore[no-any-return]


async def main() -> None:
    asked = json.load(sys.stdin)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Recorder)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.NamedTemporaryFile("w", suffix=".json") as config:
        config.write(kubeconfig(server.server_port))
        config.flush()
        result = {
            "lint": await lint(asked["chart"], config.name),
            "cases": [await install(asked["chart"], values, config.name) for values in asked["cases"]],
        }
    json.dump(result, sys.stdout)
    server.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
