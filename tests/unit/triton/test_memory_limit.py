"""How an instance lifts the limit that tritonserver handed on: in processes of their own."""

from __future__ import annotations

import subprocess
import sys

import pytest

UNLIMITED = -1


@pytest.mark.parametrize(("hard", "expected"), [(UNLIMITED, UNLIMITED), (4 << 30, 4 << 30)])
def test_as_far_as_the_users_own_goes(hard: int, expected: int) -> None:
    program = f"""
import resource
from graphkiln_backend.triton.environment import lift_memory_limit
resource.setrlimit(resource.RLIMIT_DATA, (1 << 30, {hard}))
lift_memory_limit()
print(resource.getrlimit(resource.RLIMIT_DATA)[0])
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert int(finished.stdout) == expected
