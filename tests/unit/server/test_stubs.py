"""The processes of instances, as Triton starts them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import psutil
import pytest

from graphkiln_backend.server import watchdog as module
from graphkiln_backend.server.watchdog import read_stubs

TREE = """
for backend in $2; do
    $1/triton_python_backend_stub $3/model.py prefix 2097152 336 name_0 $1/$backend &
done
$1/another $3/model.py prefix $1/graphkiln &
echo; wait
"""


class Start(Protocol):
    def __call__(self, backends: str, model: str = "/store/m/3") -> int: ...


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a process with children, and returns it."""
    for name in ("triton_python_backend_stub", "another"):
        (tmp_path / name).write_text("#!/bin/sh\nread -r _ < $FIFO\n")
        (tmp_path / name).chmod(0o755)
    with ExitStack() as stack:

        def start(backends: str, model: str = "/store/m/3") -> int:
            arguments = [str(tmp_path), backends, model]
            process = stack.enter_context(
                subprocess.Popen(
                    ["/bin/sh", "-c", TREE, "tree", *arguments],
                    stdout=subprocess.PIPE,
                    env={"FIFO": str(fifo)},
                )
            )
            stack.callback(end, process.pid)
            assert process.stdout is not None
            process.stdout.readline()
            return process.pid

        fifo = tmp_path / "fifo"
        os.mkfifo(fifo)
        yield start


def end(process: int) -> None:
    tree = [*psutil.Process(process).children(recursive=True), psutil.Process(process)]
    for member in tree:
        member.kill()


def wait_for(process: int, count: int) -> list[str]:
    deadline = time.monotonic() + 20
    while len(stubs := read_stubs(process)) != count:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert all(-1 < stub.age_s < 60 for stub in stubs)
    return [f"{stub.model} {stub.version}" for stub in stubs]


def test_stubs_of_every_name_of_the_backend(start: Start) -> None:
    process = start("graphkiln onnxruntime oneflow")
    assert wait_for(process, 3) == ["m 3"] * 3


def test_stubs_of_other_backends_are_not_ours(start: Start) -> None:
    process = start("theirs graphkiln", "/store/other/12")
    assert wait_for(process, 1) == ["other 12"]


def test_a_child_that_has_ended_is_told_until_somebody_asks_how() -> None:
    program = "import os; os.fork() or os._exit(1); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdout.readline()
            deadline = time.monotonic() + 20
            while not (found := read_stubs(process.pid)):
                assert time.monotonic() < deadline
                time.sleep(0.01)
            (stub,) = found
            assert (stub.ended, stub.model) == (True, "")
            assert -1 < stub.age_s < 60
            others = {each.pid for each in read_stubs(os.getpid())}  # a server of other tests may run here
            assert stub.pid not in others, "children of others are theirs to ask about"
        finally:
            process.kill()


def test_a_server_that_is_gone_has_none() -> None:
    with subprocess.Popen(["/bin/true"]) as process:
        pass
    assert read_stubs(process.pid) == []


def test_a_clock_that_is_set_makes_no_stub_older(monkeypatch: pytest.MonkeyPatch) -> None:
    with subprocess.Popen(["/bin/sleep", "60"]) as process:
        try:
            real = time.time()
            monkeypatch.setattr(time, "time", lambda: real + 3600)
            assert 0 <= module.process_age_s(process.pid) < 30
        finally:
            process.kill()
