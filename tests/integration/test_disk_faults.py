"""A real server starts whatever the state of its artifact cache."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from running import COMMAND, StartServer, free_ports, run_command

pytestmark = pytest.mark.server


@pytest.fixture
def tmpfs(tmp_path: Path) -> Iterator[Path]:
    """Mount a small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "none", str(folder)]
    if subprocess.run(command, capture_output=True, check=False).returncode != 0:
        pytest.skip("this user may not mount a file system")
    with ExitStack() as stack:
        stack.callback(subprocess.run, ["umount", str(folder)], check=True)
        yield folder


def fill(folder: Path) -> None:
    with (folder / "filler").open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            pass


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


def lines_about_the_cache(log: str) -> list[str]:
    return [line for line in log.splitlines() if "artifact cache" in line]


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fill, make_read_only])
def test_cache_on_a_full_or_read_only_disk(start_server: StartServer, digits: Path, tmpfs: Path, fault: object) -> None:
    assert callable(fault)
    fault(tmpfs)
    server = start_server("--model-store", digits.parent, "--cache", tmpfs)
    server.wait_ready()
    server.wait_until(lambda: "serving HTTP" in server.log)
    assert len(lines_about_the_cache(server.log)) == 1, server.log
    assert "Traceback" not in server.log
    assert server.stop()[0] == 0


@pytest.mark.slow
def test_cache_becomes_full_while_it_is_filled(start_server: StartServer, digits: Path, tmpfs: Path) -> None:
    (tmpfs / "entries").mkdir()  # 64 kB are too little for what is compiled, and enough to begin
    server = start_server("--model-store", digits.parent, "--cache", tmpfs)
    server.wait_ready()
    assert len(lines_about_the_cache(server.log)) == 1, server.log
    assert "is full" in server.log
    assert server.stop()[0] == 0


@pytest.mark.slow
def test_cache_writable_by_others(start_server: StartServer, digits: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    cache.chmod(0o777)
    server = start_server("--model-store", digits.parent, "--cache", cache)
    server.wait_ready()
    (line,) = lines_about_the_cache(server.log)
    assert f"{cache} is not trusted" in line
    assert list(cache.iterdir()) == []
    assert server.stop()[0] == 0


def test_temporary_folder_without_space_is_replaced(tmpfs: Path) -> None:
    finished = run_command("doctor", "--json", env={"TMPDIR": str(tmpfs)})
    assert f"{tmpfs} is full: using /tmp for temporary files" in finished.stderr
    assert '"message": "/tmp, ' in finished.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount file systems")
def test_read_only_machine_is_a_one_line_error(digits: Path) -> None:
    """Everything is mounted read-only, in a mount namespace of the test."""
    script = """
set -e
mount --make-rprivate /
for place in $(awk '$2 !~ "^/(proc|sys)" {print $2}' /proc/mounts | sort -u); do
    mount -o remount,bind,ro "$place" 2>/dev/null || true
done
mount -o remount,bind,ro / || mount -o remount,ro /
cd /
exec "$@"
"""
    ports = [f"--{name}-port={port}" for name, port in zip(("http", "grpc", "metrics"), free_ports(3), strict=True)]
    serve = [*COMMAND, "serve", "--model-store", str(digits.parent), *ports]
    command = ["unshare", "--mount", "sh", "-c", script, "sh", *serve]
    environment = {**os.environ, "HOME": "/nonexistent", "GRAPHKILN_CACHE": "", "PYTHONDONTWRITEBYTECODE": "1"}
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    if "unshare" in finished.stderr:
        pytest.skip("this user may not make mount namespaces")
    assert finished.returncode == 2, finished.stderr
    assert "Traceback" not in finished.stderr
    last = finished.stderr.strip().splitlines()[-1]
    assert "cannot make a temporary folder" in last
    assert "set TMPDIR" in last
