"""Accepted requests and security headers of the page."""

from __future__ import annotations

import re

import pytest
from starlette.testclient import TestClient

from graphkiln.page import security
from graphkiln.page.security import POLICY

IMAGE = "/api/models/m/1/image"


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:8003", "localhost:8003", "LOCALHOST", "localhost.:8003", "[::1]:8003", "[::1]", "models.example"],
)
def test_accepted_hosts(page: TestClient, host: str) -> None:
    assert page.get("/api/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "",
        ".",
        "[::1",
        "a@127.0.0.1",
        "127.0.0.1/x",
        "127.0.0.1?x",
        "127.0.0.1#x",
        "127.0.0.1:x",
        "localhost..",
        "2130706433",
    ],
)
def test_foreign_host_is_refused(page: TestClient, host: str) -> None:
    for path in ("/", "/api/models", "/nowhere"):
        response = page.get(path, headers={"Host": host})
        assert response.status_code == 421
        assert "not served as" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://127.0.0.1:8003", 200),
        ("http://127.0.0.1:8004", 403),
        ("https://127.0.0.1:8003", 403),
        ("http://localhost:8003", 403),
        ("http://evil.example", 403),
        ("null", 403),
    ],
)
def test_foreign_origin_is_refused(page: TestClient, origin: str, status: int) -> None:
    assert (
        page.post("/api/models/m/load", headers={"Origin": origin, "x-graphkiln-admin-key": "k"}).status_code == status
    )


@pytest.mark.parametrize(
    ("site", "destination", "status"),
    [("same-origin", "empty", 200), ("none", "document", 200), ("cross-site", "document", 200),
     ("cross-site", "empty", 403), ("same-site", "image", 403)],
)  # fmt: skip
def test_sec_fetch_site_is_checked(page: TestClient, site: str, destination: str, status: int) -> None:
    headers = {"Sec-Fetch-Site": site, "Sec-Fetch-Dest": destination}
    assert page.get("/api/models", headers=headers).status_code == status


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/"), ("HEAD", "/app.js"), ("GET", "/api/models"), ("DELETE", "/nowhere"), ("GET", IMAGE)],
)
def test_security_headers(page: TestClient, method: str, path: str) -> None:
    headers = page.request(method, path).headers
    assert headers["Content-Security-Policy"] == POLICY
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


def test_content_security_policy() -> None:
    assert "default-src 'none'" in POLICY
    assert not re.search(r"unsafe|https?:|\*|data:", POLICY)


def test_large_content_length_is_refused(page: TestClient) -> None:
    response = page.post(IMAGE, content=b"x", headers={"Content-Length": str(security.BODY_LIMIT + 1)})
    assert response.status_code == 413


def test_body_larger_than_content_length(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(security, "BODY_LIMIT", 100)
    response = page.post(IMAGE, content=iter([b"x" * 60] * 2))
    assert response.status_code == 400
    assert "larger than" in response.json()["error"]["message"]


@pytest.mark.parametrize("length", ["-1", "1e9", "9" * 30])
def test_invalid_content_length(page: TestClient, length: str) -> None:
    assert page.post(IMAGE, content=b"x", headers={"Content-Length": length}).status_code == 413
