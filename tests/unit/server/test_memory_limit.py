"""How much memory tritonserver may take: limits of processes that stand in for it."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from graphkiln_backend.server import limits as module
from graphkiln_backend.server.limits import MemoryLimit, default_limit, free_memory
from graphkiln_backend.system.resources import MemoryGroup


def test_half_of_what_is_free() -> None:
    assert 2 << 30 <= default_limit() <= max(psutil.virtual_memory().total // 2, 2 << 30)


def test_a_container_has_less_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [MemoryGroup(limit_bytes=9000, used_bytes=1000), MemoryGroup(limit_bytes=3000, used_bytes=1000)]
    monkeypatch.setattr(module, "memory_groups", lambda: groups)
    assert free_memory() == 2000
    assert default_limit() == 2 << 30, "too little to start with would be no protection"


PROGRAM = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]), -1))
print("started", flush=True)
for line in sys.stdin:
    try:
        exec(line)
    except MemoryError:
        print("refused", flush=True)
    else:
        print("done", flush=True)
"""
"""Does what it is told, a line at a time."""


class Other:
    """A process with a limit of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.read()

    def read(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def do(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.read()

    @property
    def limit(self) -> int:
        return resource.prlimit(self.process.pid, resource.RLIMIT_DATA)[0]


@contextmanager
def other(own_limit: int = resource.RLIM_INFINITY) -> Iterator[Other]:
    command = [sys.executable, "-c", PROGRAM, str(own_limit)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield Other(process)


class TestMemoryLimit:
    def test_more_is_refused_and_the_process_lives(self) -> None:
        with other() as server:
            MemoryLimit(server.process.pid, 256 << 20).follow(live=True)
            assert server.do("kept = bytearray(512 << 20)") == "done"
            assert server.do("bytearray(300 << 20)") == "refused"
            assert server.do("bytearray(100 << 20)") == "done"

    def test_while_models_load_there_is_more(self) -> None:
        with other() as server:
            MemoryLimit(server.process.pid, 1 << 20).follow(live=False)
            loading = server.limit
            MemoryLimit(server.process.pid, 1 << 20).follow(live=True)
            assert loading - server.limit == (4 << 30) - (1 << 20)

    def test_stacks_of_later_threads_are_not_counted(self) -> None:
        with other() as server:
            limit = MemoryLimit(server.process.pid, 256 << 20)
            limit.follow(live=True)
            before = server.limit
            server.do("over = threading.Event()")
            server.do("threads = [threading.Thread(target=over.wait) for _ in range(20)]")
            assert server.do("[thread.start() for thread in threads]") == "done"
            limit.follow(live=True)
            assert server.limit - before == 20 * resource.getrlimit(resource.RLIMIT_STACK)[0]
            assert server.do("bytearray(700 << 20)") == "done"
            server.do("over.set()")

    def test_a_lower_limit_of_the_user_stays(self) -> None:
        with other(own_limit=200 << 20) as server:
            limit = MemoryLimit(server.process.pid, 1 << 30)
            limit.follow(live=True)
            limit.follow(live=True)
            assert server.limit == 200 << 20

    def test_none(self) -> None:
        with other() as server:
            MemoryLimit(server.process.pid, 0).follow(live=True)
            assert server.limit == resource.RLIM_INFINITY

    def test_a_process_that_has_ended(self) -> None:
        with other() as server:
            limit = MemoryLimit(server.process.pid, 1 << 30)
        limit.follow(live=True)
        MemoryLimit(server.process.pid, 1 << 30).follow(live=True)
