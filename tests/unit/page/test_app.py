"""Routes and error responses of the page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shown_server import Shown, encoded
from starlette.testclient import TestClient

from graphkiln.page.app import STATIC, build_app
from graphkiln.reporting import LOOK
from graphkiln_backend.graph.errors import (
    ClientError,
    ConnectionFailed,
    DeadlineExceeded,
    ModelNotFound,
    Overloaded,
    Unauthorized,
)
from graphkiln_backend.system.admin_key import HTTP_HEADER

KEY = {HTTP_HEADER: "secret"}
FILES = (*sorted(STATIC.iterdir()), LOOK)
_WHOLE_PAGE = 100_000


def test_page_size_is_documented(repository: Path) -> None:
    size = sum(path.stat().st_size for path in FILES)
    assert size < _WHOLE_PAGE
    assert f"{size / 1000:.0f} kB" in (repository / "docs" / "page.md").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_static_files_are_self_contained(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    for forbidden in ("http://", "https://", "//cdn", "innerHTML", "outerHTML", "insertAdjacentHTML", "eval(",
                      "document.write", "style=", "<script>", "onclick=\""):  # fmt: skip
        assert forbidden not in text


def test_static_files(page: TestClient) -> None:
    root = page.get("/")
    assert root.status_code == 200
    assert root.headers["Content-Type"].startswith("text/html")
    assert page.get("/app.js").headers["Content-Type"].startswith("text/javascript")
    assert page.get("/look.css").text == LOOK.read_text()
    assert page.get("/look.css").headers["Content-Type"].startswith("text/css")
    assert page.head("/").text == ""


@pytest.mark.parametrize(
    "path",
    ["/nowhere", "/../app.py", "/%2e%2e/app.py", "/..%2fapp.py", "/api/nothing", "/app.js/x", "/api/models/m/load"],
)
def test_unknown_paths(page: TestClient, path: str) -> None:
    assert page.get(path).status_code == 404


@pytest.mark.parametrize(("method", "path"), [("POST", "/api/models"), ("PUT", "/"), ("DELETE", "/app.js")])
def test_method_not_allowed(page: TestClient, method: str, path: str) -> None:
    assert page.request(method, path).status_code == 405


def test_models_without_admin_key(page: TestClient, shown: Shown) -> None:
    document = page.get("/api/models").json()
    assert [(row["name"], row["state"], row["engine"]) for row in document["models"]] == [("m", "READY", "onnxruntime")]
    assert (document["url"], document["most_bytes"]) == ("http://127.0.0.1:8000", 64 << 20)
    assert shown.keys == [""]


def test_admin_key_is_forwarded_and_not_kept(page: TestClient, shown: Shown) -> None:
    states = {row["name"]: row["state"] for row in page.get("/api/models", headers=KEY).json()["models"]}
    assert states == {"m": "READY", "b": "UNAVAILABLE"}
    assert [row["name"] for row in page.get("/api/models").json()["models"]] == ["m"]
    assert shown.keys == ["secret", ""]


@pytest.mark.parametrize("verb", ["load", "unload"])
def test_loading_needs_admin_key(page: TestClient, shown: Shown, verb: str) -> None:
    refused = page.post(f"/api/models/m/{verb}")
    assert (refused.status_code, shown.transport.sent(verb)) == (401, [])
    assert page.post(f"/api/models/m/{verb}", headers=KEY).json() == {}
    assert shown.transport.sent(verb)[0].arguments[0] == "m"


def test_invalid_admin_key(page: TestClient) -> None:
    response = page.post("/api/models/m/load", headers={HTTP_HEADER: "a b"})
    assert response.status_code == 400
    assert "a b" not in response.text


@pytest.mark.parametrize("query", ["top_k=x", "top_k=-1", "top_k=0", "top_k=99999", "top_k=²"])
def test_invalid_top_k_parameter(page: TestClient, query: str) -> None:
    assert page.post(f"/api/models/m/1/image?{query}", content=encoded()).status_code == 400


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ModelNotFound("there is no m"), 404),
        (Overloaded("later"), 429),
        (DeadlineExceeded("too slow"), 504),
        (ConnectionFailed("no server", hint="start it"), 502),
        (Unauthorized("no"), 401),
    ],
)
def test_server_errors_become_json(page: TestClient, shown: Shown, error: ClientError, status: int) -> None:
    shown.transport.responses["model_metadata"] = error
    response = page.get("/api/models/m/1")
    assert response.status_code == status
    assert response.json() == {"error": {"kind": type(error).__name__, "message": error.message, "hint": error.hint}}


def test_non_finite_values_are_null(page: TestClient, shown: Shown) -> None:
    shown.transport.responses["infer"] = _not_finite
    (row, _) = page.post("/api/models/m/1/image?top_k=2", content=encoded()).json()["classifications"]
    assert row["score"] is None


def test_server_without_metrics(shown: Shown) -> None:
    server = shown.server()
    server.metrics_url = ""
    with TestClient(build_app(server), base_url="http://127.0.0.1") as page:
        assert page.get("/api/metrics").status_code == 502
        assert page.get("/api/models").json()["models"][0]["name"] == "m"


def _not_finite(request: Any, timeout_s: float) -> Any:
    import numpy as np

    from graphkiln_client.transports.base import InferResponse

    del request, timeout_s
    return InferResponse(model="m", version="1", outputs={"Y": np.array([[np.inf, 0]], np.float32)})


def test_programs_use_reachable_host(shown: Shown) -> None:
    server = shown.server()
    server.everywhere = True
    with TestClient(build_app(server), base_url="http://192.0.2.7:8003") as page:
        assert page.get("/api/models").json()["url"] == "http://192.0.2.7:8000"
        assert "Client('http://192.0.2.7:8000')" in page.get("/api/models/m/1/snippets").json()["snippets"]["Python"]
