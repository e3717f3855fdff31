"""A real PostgreSQL on a free port in a temporary folder, which can stop and restart with its contents."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psycopg
from running import free_ports

START_TIMEOUT_S = 60
_USER = "graphkiln"
# The server refuses to run as root.
_UNPRIVILEGED = "nobody"


def find_program(name: str) -> str | None:
    """Find a program of PostgreSQL, which Debian keeps outside of PATH; the newest version if there are several."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: int(path.parent.name))
    folders = [str(path) for path in reversed(versions)]
    return shutil.which(name, path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


# Reason to skip tests that need a server; None if there is one: `skipif(POSTGRES_MISSING is not None, ...)`.
POSTGRES_MISSING = None if find_program("initdb") else "no PostgreSQL on this machine: apt-get install postgresql"


class PostgresServer:
    """The server, a context manager. Databases and rows survive `stop` and `start`."""

    def __init__(self) -> None:
        (self.port,) = free_ports(1)
        self._user = _UNPRIVILEGED if os.getuid() == 0 else None
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: Path | None = None

    @property
    def address(self) -> str:
        """`postgresql://USER@HOST:PORT/DATABASE`."""
        return f"postgresql://{_USER}@127.0.0.1:{self.port}/postgres"

    def connect(self, **options: Any) -> psycopg.Connection[Any]:
        """Open a connection; each statement is a transaction unless `autocommit=False` is given."""
        return psycopg.connect(self.address, **{"autocommit": True, **options})

    def start(self) -> None:
        """Start or restart."""
        assert self._folder is not None
        # No fsync: what a test wrote need not outlive the machine.
        options = [f"-p{self.port}", "-h127.0.0.1", f"-k{self._folder}", "-F"]
        log = (self._folder / "log").open("ab")
        with log:
            self._process = subprocess.Popen(
                [_program("postgres"), "-D", self._folder / "data", *options],
                user=self._user,
                cwd="/",
                stdout=log,
                stderr=log,
            )
        self._wait_ready()

    def stop(self) -> None:
        """Stop at once, as in a crash: connections break, committed rows stay."""
        if self._process:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(START_TIMEOUT_S)
            self._process = None

    def __enter__(self) -> PostgresServer:
        self._folder = Path(tempfile.mkdtemp(prefix="graphkiln-postgres-"))
        try:
            if self._user:
                shutil.chown(self._folder, self._user)
            command = [_program("initdb"), "-D", self._folder / "data", "-U", _USER, "-A", "trust", "-N", "-E", "UTF8"]
            subprocess.run(command, user=self._user, cwd="/", check=True, capture_output=True)
            self.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if self._folder:
            shutil.rmtree(self._folder)

    def _wait_ready(self) -> None:
        assert self._process is not None
        assert self._folder is not None
        end = time.monotonic() + START_TIMEOUT_S
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((self._folder / "log").read_text())
            time.sleep(0.05)

    def _is_ready(self) -> bool:
        try:
            self.connect(connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


def _program(name: str) -> str:
    found = find_program(name)
    assert found, POSTGRES_MISSING
    return found
