"""Where servers listen, as those beside them find it."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.ports import publish_address, served_addresses
from graphkiln_backend.system.owned_folder import OWNER_FILE, OwnedFolder

KNOWN = dict.fromkeys(("http-port", "http-address", "grpc-port", "allow-http", "allow-grpc"), True)


def flags(*arguments: str, host: str = "0.0.0.0") -> TritonFlags:
    return TritonFlags.parse(arguments, KNOWN, host)


@pytest.mark.parametrize(
    ("given", "found"),
    [
        (flags(), [("http", "127.0.0.1", 8000)]),
        (flags("--http-port=9000", host="10.0.0.7"), [("http", "10.0.0.7", 9000)]),
        (flags(host="::"), [("http", "::1", 8000)]),
        (flags("--http-address=ipv6:::1"), [("http", "::1", 8000)]),
        (flags("--allow-http=false"), [("grpc", "127.0.0.1", 8001)]),
        (flags("--allow-http=false", "--allow-grpc=false"), []),
    ],
)
def test_what_is_told_is_found(given: TritonFlags, found: list[tuple[str, str, int]], tmp_path: Path) -> None:
    with OwnedFolder(tmp_path) as run:
        publish_address(run.path, given)
        assert list(served_addresses([tmp_path])) == found
    assert list(served_addresses([tmp_path])) == []


def test_what_dead_servers_told_and_what_cannot_be_read_is_left_out(tmp_path: Path) -> None:
    dead = tmp_path / "graphkiln-dead"  # which nobody has locked
    dead.mkdir()
    (dead / OWNER_FILE).touch()
    publish_address(dead, flags())
    with OwnedFolder(tmp_path) as damaged, OwnedFolder(tmp_path):
        (damaged.path / "address.json").write_text('["http"')
        assert list(served_addresses([tmp_path])) == []
