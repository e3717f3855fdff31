"""What all instances take together."""

from __future__ import annotations

import logging

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import limits as module
from graphkiln_backend.server.limits import INSTANCE_BYTES, check_instances


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What was asked of the other limits."""
    found: list[tuple[str, int]] = []
    monkeypatch.setattr(module, "check_threads", lambda count: found.append(("threads", count)))
    monkeypatch.setattr(module, "check_files", lambda count: found.append(("files", count)))
    return found


def test_memory_that_is_too_little_is_said_and_no_reason_not_to_start(
    asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "free_memory", lambda: 200 * INSTANCE_BYTES)
    with caplog.at_level(logging.WARNING):
        check_instances(200)
        assert caplog.messages == []
        check_instances(201)
    assert asked == [("threads", 200), ("files", 200), ("threads", 201), ("files", 201)]
    (message,) = caplog.messages
    assert message.startswith("201 model instances take 8.833 GiB beside their graphs, and 8.789 GiB of memory are ")


def test_what_cannot_be_had_is_refused(asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise ServerSetupError("too few")

    monkeypatch.setattr(module, "check_files", refuse)
    with pytest.raises(ServerSetupError, match="too few"):
        check_instances(3)
    assert asked == [("threads", 3)]
