"""How tritonserver is started."""

from __future__ import annotations

from pathlib import Path

from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.launch import command_line
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.shared_memory import SharedMemoryPlan

KNOWN = {"log-verbose": True}
MEMORY = SharedMemoryPlan(region_bytes=1 << 20, needed_bytes=0)


def test_our_defaults_give_way_to_the_users_flags(installation: Installation) -> None:
    with RunFolder() as folder:
        quiet = command_line(installation, folder, [Path("/s")], TritonFlags.parse([], KNOWN), MEMORY, complete=True)
        loud = command_line(
            installation, folder, [], TritonFlags.parse(["--log-verbose=1"], KNOWN), MEMORY, complete=False
        )
    assert "--log-info=false" in quiet
    assert "--model-repository=/s" in quiet
    assert "--backend-config=python,shm-default-byte-size=1048576" in quiet
    assert "--log-info=false" not in loud
    assert loud[-1] == "--log-verbose=1"
