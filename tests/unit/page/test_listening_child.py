"""A child that serves a port: it inherits the listener, is restarted, and ends with its parent."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import psutil
import pytest
from running import free_ports

from graphkiln.page.listening_child import ListeningChild
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server.flags import ListenAddress

CHILD = """
import asyncio, socket, sys
from graphkiln.page.listening_child import run_until_orphaned

async def answer(reader, writer):
    writer.write(sys.argv[2].encode())
    writer.close()

async def serve():
    server = await asyncio.start_server(answer, sock=socket.socket(fileno=int(sys.argv[1])))
    await server.serve_forever()

asyncio.run(run_until_orphaned(serve()))
"""


def at(port: int) -> ListenAddress:
    return ListenAddress(protocol="HTTP", host="127.0.0.1", port=port)


def heard(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        return connection.recv(100)


def test_child_serves_is_restarted_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "greeting_child.py").write_text(CHILD)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    (port,) = free_ports(1)
    with ListeningChild("greeting", "greeting_child", ["hello"], at(port)) as child:
        assert heard(port) == b"hello"
        first = child.pid
        os.kill(first, signal.SIGKILL)
        assert heard(port) == b"hello", "clients wait for the next child"
        last = child.pid
        assert last != first
    assert not psutil.pid_exists(last)


def test_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = at(holder.getsockname()[1])
        with pytest.raises(ServerSetupError, match="HTTP"):
            ListeningChild("greeting", "nowhere", [], address)
