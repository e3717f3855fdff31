"""Which endpoints need a key."""

from __future__ import annotations

from graphkiln_backend.graph.admin_key import GRPC_HEADER, HTTP_HEADER
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.admin_key import AdminKey
from graphkiln_backend.server.flags import TritonFlags

KNOWN = dict.fromkeys(("http-restricted-api", "grpc-restricted-protocol"), True)
KEY = AdminKey("abc")


def plan(*arguments: str, key: AdminKey | None = KEY) -> Access:
    """The access of a server with these flags."""
    return Access.plan(TritonFlags.parse(arguments, KNOWN), key)


def test_everything_that_changes_the_server_needs_the_key() -> None:
    access = plan()
    endpoints = "model-repository,shared-memory,trace,logging"
    assert access.arguments == (
        f"--http-restricted-api={endpoints}:{HTTP_HEADER}=abc",
        f"--grpc-restricted-protocol={endpoints}:{HTTP_HEADER}=abc",
    )
    assert access.http_headers == {HTTP_HEADER: "abc"}
    assert access.grpc_metadata == ((GRPC_HEADER, "abc"),)
    assert access.open_endpoints == ()
    assert "abc" not in repr(access)


def test_the_users_own_restrictions_win() -> None:
    access = plan("--http-restricted-api", "health,model-repository:X-Mine=z=1", "--http-restricted-api=trace:b=2")
    assert access.arguments[0] == f"--http-restricted-api=shared-memory,logging:{HTTP_HEADER}=abc"
    assert access.http_headers == {HTTP_HEADER: "abc", "X-Mine": "z=1", "b": "2"}
    assert access.grpc_metadata == ((GRPC_HEADER, "abc"),)


def test_nothing_is_left_to_restrict() -> None:
    access = plan("--grpc-restricted-protocol=model-repository,shared-memory,trace,logging:Mine=z", key=None)
    assert access.arguments == ()
    assert access.grpc_metadata == (("triton-grpc-protocol-mine", "z"),)
    assert access.open_endpoints == tuple(
        f"HTTP {name}" for name in ("model-repository", "shared-memory", "trace", "logging")
    )


def test_a_server_that_is_open_on_purpose() -> None:
    access = plan(key=None)
    assert access.arguments == ()
    assert not access.http_headers
    assert len(access.open_endpoints) == 8
