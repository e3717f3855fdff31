"""Which endpoints need a key."""

from __future__ import annotations

import pytest

from graphkiln_backend.server.access import Access, AdminKey
from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.system.admin_key import GRPC_HEADER, HTTP_HEADER

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


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("::1", False), ("10.1.1.1", True)])
def test_an_open_server_is_loud_on_public_addresses_only(
    host: str, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    flags = TritonFlags.parse([], KNOWN, host)
    Access.plan(flags, None).warn_if_open(flags)
    assert ("DANGER" in caplog.text) is warned
    caplog.clear()
    Access.plan(flags, KEY).warn_if_open(flags)
    assert not caplog.text


def test_services_that_know_no_key_are_loud(caplog: pytest.LogCaptureFixture) -> None:
    flags = TritonFlags.parse(["--allow-sagemaker=true"], {"allow-sagemaker": True})
    Access.plan(flags, KEY).warn_if_open(flags)
    assert "sagemaker" in caplog.text


def test_a_server_that_is_open_on_purpose() -> None:
    access = plan(key=None)
    assert access.arguments == ()
    assert not access.http_headers
    assert len(access.open_endpoints) == 8
