"""The memory limit of tritonserver's process, and how instances lift it: in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HALF = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def outcome(program: str) -> str:
    """What a program prints in a process of its own."""
    lines = ["import resource", "from graphkiln_backend.triton.memory_limit import *", program]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()


def test_more_than_half_of_the_memory_cannot_be_allocated() -> None:
    program = f"""
limit_memory({HALF})
try:
    bytearray({HALF} + (1 << 30))
except MemoryError:
    print("refused")
"""
    assert outcome(program) == "refused"


def test_an_instance_lifts_the_limit() -> None:
    program = """
limit_memory(1 << 30)
lift_memory_limit()
soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
print(soft == hard)
"""
    assert outcome(program) == "True"


@pytest.mark.parametrize("limit", [1 << 30, HALF // 2])
def test_the_users_own_limit_wins(limit: int) -> None:
    program = f"""
resource.setrlimit(resource.RLIMIT_DATA, ({limit}, {limit}))
limit_memory({HALF})
lift_memory_limit()
print(resource.getrlimit(resource.RLIMIT_DATA) == ({limit}, {limit}))
"""
    assert outcome(program) == "True"
