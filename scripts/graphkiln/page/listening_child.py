"""A child process that serves a port for as long as this process lives, and is started again when it ends.

The port belongs to the parent: clients that come while there is no child wait instead of being refused.
"""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from graphkiln_backend.server.flags import ListenAddress
from graphkiln_backend.server.ports import listen
from graphkiln_backend.system.closing import Closeable
from graphkiln_backend.system.processes import start

if TYPE_CHECKING:
    import asyncio

_log = logging.getLogger("graphkiln.server")


_PAUSE_S = 0.2


class ListeningChild(Closeable):
    """Listen at an address, which a module of ours serves in another process.

    Args:
        what: The process, in a word for the log.
        module: Run as `python -m MODULE LISTENER ARGUMENTS...`; LISTENER is a file descriptor. It passes its work to
            `run_until_orphaned`.
        arguments: Further arguments; other users of the machine can read them.
        address: Where to listen.

    Raises:
        ServerSetupError: The address is in use.
    """

    def __init__(self, what: str, module: str, arguments: Sequence[str], address: ListenAddress) -> None:
        self._what = what
        self._module = module
        self._arguments = arguments
        self._closing = threading.Event()
        self._listener = listen(address)
        self._child = self._start()
        self._thread = threading.Thread(target=self._watch, name=f"graphkiln-{what.lower()}")
        self._thread.start()

    @property
    def pid(self) -> int:
        """The child process."""
        return self._child.pid

    def close(self) -> None:
        """End the child process and all its connections."""
        self._closing.set()
        self._child.kill()
        self._thread.join()
        self._listener.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """The child ends with the pipe to its standard input: with this process, however that ends."""
        command = [sys.executable, "-P", "-m", self._module, str(self._listener.fileno()), *self._arguments]
        return start(command, stdin=subprocess.PIPE, pass_fds=(self._listener.fileno(),))

    def _watch(self) -> None:
        while self._child.wait() is not None and not self._closing.wait(_PAUSE_S):
            _log.warning("the %s process ended with code %s: starting it again", self._what, self._child.returncode)
            _close_pipe(self._child)
            self._child = self._start()
            if self._closing.is_set():
                self._child.kill()
        _close_pipe(self._child)


async def run_until_orphaned(serving: Coroutine[object, object, None]) -> None:
    """Serve, in the child, until the parent is gone, which holds our standard input open as long as it lives."""
    import asyncio  # the parent needs none of it, and imports ssl with it

    work = asyncio.ensure_future(serving)
    orphaned = asyncio.create_task(_cancel_when_orphaned(work))
    with suppress(asyncio.CancelledError):
        await work
    orphaned.cancel()


async def _cancel_when_orphaned(work: asyncio.Future[None]) -> None:
    import asyncio

    await asyncio.to_thread(sys.stdin.buffer.read)
    work.cancel()


def _close_pipe(child: subprocess.Popen[bytes]) -> None:
    if child.stdin:
        child.stdin.close()
