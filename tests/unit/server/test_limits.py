"""Pools of threads that get smaller where there are many, and limits that are too low for a start."""

from __future__ import annotations

import logging
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import limits as module
from graphkiln_backend.server.limits import (
    INSTANCE_BYTES,
    MemoryLimit,
    check_files,
    check_instances,
    check_threads,
    default_limit,
    free_memory,
    free_shared_memory,
    plan_shared_memory,
    pool_size,
    raise_file_limit,
)
from graphkiln_backend.system.resources import MemoryGroup


@pytest.mark.parametrize(("instances", "threads"), [(1, 32), (32, 32), (64, 16), (400, 8), (0, 32)])
def test_pools_of_many_are_small(instances: int, threads: int) -> None:
    assert pool_size(instances) == threads


@pytest.fixture
def allowed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Limits of control groups: none until a test sets one."""
    found: list[tuple[int, str]] = []
    monkeypatch.setattr(module, "_allowed_by_groups", lambda: found)
    monkeypatch.setattr(module, "_allowed_to_user", lambda: ())
    return found


def test_too_few_are_an_error_with_the_way_out(allowed: list[tuple[int, str]]) -> None:
    check_threads(400)
    allowed.append((2048, "podman run --pids-limit=0"))
    check_threads(40)
    with pytest.raises(
        ServerSetupError, match=r"400 model instances need at least 8050 threads, and only 2048 more"
    ) as caught:
        check_threads(400)
    assert caught.value.hint.startswith("podman run --pids-limit=0; or fewer models")


def test_groups_on_the_way_count(tmp_path: Path) -> None:
    (tmp_path / "own").write_text("0::/pod/container\n")
    inner = tmp_path / "cgroup" / "pod" / "container"
    inner.mkdir(parents=True)
    (inner / "pids.max").write_text("max\n")
    (inner.parent / "pids.max").write_text("1000\n")
    (inner.parent / "pids.current").write_text("400\n")
    groups = module._allowed_by_groups(tmp_path / "cgroup", tmp_path / "own")
    assert [count for count, _ in groups] == [600]


def test_the_limit_of_a_user_is_raised_as_far_as_it_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(100, 300)]
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, pair: limits.append(pair))
    assert [count for count, _ in module._allowed_to_user()] == [300]
    assert limits[-1] == (300, 300)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert list(module._allowed_to_user()) == []


# The limit of open files: raised as far as it can be, and refused where that is too little.

ANY = module.resource.RLIM_INFINITY


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The limits of this process, the last ones now in force."""
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(module.resource, "getrlimit", lambda _: found[-1])
    monkeypatch.setattr(module.resource, "setrlimit", lambda _, pair: found.append(pair))
    return found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((1024, 4096), (4096, 4096)),
        ((64, 1 << 30), (65_536, 1 << 30)),
        ((1024, ANY), (65_536, ANY)),
        ((ANY, ANY), (ANY, ANY)),
        ((100_000, 100_000), (100_000, 100_000)),
        ((256, 256), (256, 256)),
    ],
)
def test_it_is_raised_as_far_as_it_may_be(
    limits: list[tuple[int, int]], before: tuple[int, int], after: tuple[int, int]
) -> None:
    limits.append(before)
    raise_file_limit()
    assert limits[-1] == after


def test_too_little_is_one_line_with_the_fix(limits: list[tuple[int, int]]) -> None:
    limits.append((32, 64))
    with pytest.raises(ServerSetupError, match=r"no more than 64 files .* needs 256, .*ulimit -n 4096.*nofile"):
        raise_file_limit()


def test_hundreds_of_instances_need_more(limits: list[tuple[int, int]]) -> None:
    limits.append((512, 512))
    check_files(85)
    with pytest.raises(ServerSetupError, match=r"no more than 512 files .* of 86 model instances needs 514, .*-n 4096"):
        check_files(86)
    with pytest.raises(ServerSetupError, match=r"ulimit -n 6512.*nofile=6512:6512"):
        check_files(1000)
    for unlimited in ((ANY, ANY), (1024, ANY)):
        limits.append(unlimited)
        check_files(1000)


# How much memory tritonserver may take: limits of processes that stand in for it.


def test_half_of_what_is_free() -> None:
    assert 2 << 30 <= default_limit() <= max(psutil.virtual_memory().total // 2, 2 << 30)


def test_a_container_has_less_than_its_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = [MemoryGroup(limit_bytes=9000, used_bytes=1000), MemoryGroup(limit_bytes=3000, used_bytes=1000)]
    monkeypatch.setattr(module, "memory_groups", lambda: groups)
    assert free_memory() == 2000
    assert default_limit() == 2 << 30, "too little to start with would be no protection"


# Runs the lines of its standard input.
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


# What all instances take together.


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Requests to the other limits."""
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
    assert message.startswith("201 model instances need 8.833 GiB beside their graphs, and 8.789 GiB of memory is ")


def test_what_cannot_be_had_is_refused(asked: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise ServerSetupError("too few")

    monkeypatch.setattr(module, "check_files", refuse)
    with pytest.raises(ServerSetupError, match="too few"):
        check_instances(3)
    assert asked == [("threads", 3)]


# Shared memory: enough for the largest batches, or an error with the fix.

MB = 1 << 20


def make_store(folder: Path, *, rows: int, instances: int) -> Path:
    (folder / "m").mkdir(parents=True)
    (folder / "m" / "config.pbtxt").write_text(
        f'backend: "graphkiln" max_batch_size: {rows} instance_group {{ count: {instances} }}'
        'input { name: "x" data_type: TYPE_FP32 dims: [1000, 250] }'
        'output { name: "y" data_type: TYPE_FP32 dims: [-1] }'
    )
    return folder


def test_a_region_holds_the_largest_batch(tmp_path: Path) -> None:
    planned = plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=1000 * MB)
    assert 8_000_000 < planned.region_bytes < 16_000_000
    assert planned.instances == 2


def test_too_little_is_an_error_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(ServerSetupError, match=r"has 16 MB left, but 2 model instances need .*--shm-size=\d+m"):
        plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=16 * MB)


def test_regions_grow_on_demand_where_memory_is_scarce(tmp_path: Path) -> None:
    planned = plan_shared_memory([make_store(tmp_path, rows=8, instances=2)], free_bytes=30 * MB)
    assert planned.region_bytes == MB


def test_a_full_one_is_an_error_also_where_no_model_is_known_yet() -> None:
    with pytest.raises(ServerSetupError, match=r"/dev/shm is full: 100 kB left.*--shm-size"):
        plan_shared_memory([], free_bytes=100 << 10)


def test_one_size_serves_the_largest_of_several_models(tmp_path: Path) -> None:
    small, large = make_store(tmp_path / "a", rows=1, instances=1), make_store(tmp_path / "b", rows=8, instances=1)
    alone = plan_shared_memory([large], free_bytes=1000 * MB)
    both = plan_shared_memory([small, large], free_bytes=1000 * MB)
    assert both.region_bytes == alone.region_bytes


def test_the_largest_size_is_given_where_half_of_the_memory_stays_free(tmp_path: Path) -> None:
    store = make_store(tmp_path, rows=8, instances=2)
    region = plan_shared_memory([store], free_bytes=1000 * MB).region_bytes
    assert plan_shared_memory([store], free_bytes=4 * region).region_bytes == region
    assert plan_shared_memory([store], free_bytes=4 * region - 1).region_bytes == MB


def test_the_suggested_size_is_enough_for_the_plan(tmp_path: Path) -> None:
    store = make_store(tmp_path, rows=8, instances=2)
    with pytest.raises(ServerSetupError) as raised:
        plan_shared_memory([store], free_bytes=0)
    (size_mb,) = re.findall(r"--shm-size=(\d+)m", raised.value.hint)
    assert plan_shared_memory([store], free_bytes=int(size_mb) * MB).region_bytes > MB


def test_without_shared_memory_nothing_can_be_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(module, "SHARED_MEMORY", tmp_path / "gone")
    with pytest.raises(ServerSetupError, match="Triton needs it for tensors") as raised:
        free_shared_memory()
    assert raised.value.hint == "mount a tmpfs there"
