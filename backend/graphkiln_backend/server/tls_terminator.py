"""Ends TLS connections and passes their bytes on to a port of this machine: the child process of `server.tls`.

    python -m graphkiln_backend.server.tls_terminator LISTENER PORT CERTIFICATE KEY CLIENT_AUTHORITIES

It ends when its standard input does.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress

from graphkiln_backend.server.listening_child import run_until_orphaned
from graphkiln_backend.server.tls import TlsFiles

_CHUNK_BYTES = 1 << 18
_HANDSHAKE_S = 10.0  # A client that connects and says nothing is let go
_HOST = "127.0.0.1"


class Terminator:
    """Pass connections on."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def serve(self, listener: socket.socket, files: TlsFiles) -> None:
        """Serve until it is cancelled."""
        server = await asyncio.start_server(
            self._pass_on,
            sock=listener,
            ssl=files.context(),
            ssl_handshake_timeout=_HANDSHAKE_S,
            limit=_CHUNK_BYTES,
        )
        async with server:
            await server.serve_forever()

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):  # one side is gone, which ends the connection
            inner_reader, inner_writer = await asyncio.open_connection(_HOST, self._port, limit=_CHUNK_BYTES)
            await _join(_Pipe(reader, inner_writer), _Pipe(inner_reader, writer))
        writer.close()


class _Pipe:
    """One direction of a connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer

    async def run(self) -> None:
        with suppress(OSError):
            while data := await self._reader.read(_CHUNK_BYTES):
                self.writer.write(data)
                await self.writer.drain()


async def _join(*pipes: _Pipe) -> None:
    """Run both directions until one ends: neither HTTP nor TLS goes on with half a connection."""
    tasks = [asyncio.create_task(pipe.run()) for pipe in pipes]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, pipe in zip(tasks, pipes, strict=True):
        task.cancel()
        pipe.writer.close()


async def run(arguments: Sequence[str]) -> None:
    """Serve until the parent is gone."""
    descriptor, port, *files = arguments
    listener = socket.socket(fileno=int(descriptor))
    certificate, key, authorities = files
    await run_until_orphaned(Terminator(int(port)).serve(listener, TlsFiles.of_words(certificate, key, authorities)))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1:]))
