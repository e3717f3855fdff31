"""Who holds a claim: seen to be gone on its own machine, believed on any other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from graphkiln_backend.scoring.destinations.lease import Holder, is_dead_writer, is_gone, writer_token

PRINT = (
    "from graphkiln_backend.scoring.destinations.lease import Holder, writer_token\n"
    "import dataclasses, json; print(json.dumps([dataclasses.asdict(Holder.of_this_process('other')), writer_token()]))"
)


def test_this_process_lives() -> None:
    holder = Holder.of_this_process("run")
    assert not is_gone(holder)
    assert not is_dead_writer(writer_token())
    assert str(holder) == f"run run (process {holder.pid} on {holder.host})"


def test_a_process_that_ended_is_gone() -> None:
    import json

    printed = subprocess.run([sys.executable, "-c", PRINT], capture_output=True, text=True, check=True).stdout
    holder, token = json.loads(printed)
    assert is_gone(Holder(**holder))
    assert is_dead_writer(token)


def test_a_number_that_is_used_again_is_another_process() -> None:
    holder = Holder.of_this_process("run")
    assert is_gone(replace(holder, started=holder.started - 1))


def test_nobody_sees_the_processes_of_another_machine() -> None:
    holder = replace(Holder.of_this_process("run"), machine="other", started=1)
    assert not is_gone(holder)
    machine, pid, _ = writer_token().split("-")
    assert is_dead_writer(f"{machine}-{pid}-1")
    assert not is_dead_writer(f"{'0' * len(machine)}-{pid}-1")
