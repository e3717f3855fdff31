"""Starts a program with arguments that no other user of the machine can read.

tritonserver takes the admin key as an argument, and `/proc/PID/cmdline` can be read by everybody. So the command line
holds a mask in its place, and the true argument goes into the environment, which only the same user can read. The
program is stopped when it has been loaded (PTRACE_TRACEME), and this process, its parent, turns the mask's pointer in
`argv` to the environment: 8 bytes of the stack, before the first instruction runs.

Source: ptrace(2), proc(5): `arg_start` to `env_end` in `/proc/PID/stat`; the initial stack of the System V ABI.
"""

from __future__ import annotations

import ctypes
import logging
import os
import struct
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

_log = logging.getLogger("graphkiln.server")

_LIBC = ctypes.CDLL(None, use_errno=True)
_PTRACE_TRACEME, _PTRACE_DETACH = 0, 17
_VARIABLE = "GRAPHKILN_ARGUMENT_"
_FIRST_FIELD = 45
"""Of `arg_start` among the fields that follow the program's name."""


@dataclass(frozen=True, slots=True)
class _Masked:
    """Masks by the number that names their variable."""

    masks: Sequence[bytes]

    def reveal(self, pid: int) -> None:
        """Turns the pointers of a stopped process to its environment."""
        arguments, _, environment, end = _bounds(pid)
        with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
            words, variables = _read(memory, arguments, environment), _read(memory, environment, end)
            bottom = _stack(pid)
            stack = _read(memory, bottom, arguments)
            for number, mask in enumerate(self.masks):
                pointer = stack.index(struct.pack("P", arguments + words.index(b"\0" + mask + b"\0") + 1))
                name = f"{_VARIABLE}{number}=".encode()
                _write(memory, bottom + pointer, struct.pack("P", environment + variables.index(name) + len(name)))


def start_hidden(
    command: Sequence[str], hidden: Sequence[str], env: Mapping[str, str], begin: Callable[[], None]
) -> subprocess.Popen[bytes]:
    """Starts a program in a session of its own.

    Args:
        command: Its command line.
        hidden: Which of its words must not be seen; of each, what follows the last `=` is masked.
        env: Its environment.
        begin: Called in the child, before it becomes the program.

    Returns:
        The process. Where the system allows no such thing, its arguments can be seen, and the log says so.
    """
    if not hidden:
        return _start(command, env, begin)
    try:
        return _start_masked(command, hidden, env, begin)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        _log.warning("other users of this machine can read the admin key in the process list: %s", error)
        return _start(command, env, begin)


def _start_masked(
    command: Sequence[str], hidden: Sequence[str], env: Mapping[str, str], begin: Callable[[], None]
) -> subprocess.Popen[bytes]:
    masks = [f"{word.rpartition('=')[0]}=***" for word in hidden]
    shown = [masks[hidden.index(word)] if word in hidden else word for word in command]
    variables = {f"{_VARIABLE}{number}": word for number, word in enumerate(hidden)}
    process = _start(shown, {**env, **variables}, lambda: _begin_traced(begin))
    try:
        _wait_until_loaded(process)
        _Masked([mask.encode() for mask in masks]).reveal(process.pid)
        _ptrace(_PTRACE_DETACH, process.pid)
    except BaseException:
        process.kill()
        process.wait()
        raise
    return process


def _start(command: Sequence[str], env: Mapping[str, str], begin: Callable[[], None]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        env=env,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        restore_signals=False,  # SIGPIPE stays ignored: a log that nobody reads any more is no reason to end
        preexec_fn=begin,  # noqa: PLW1509 - system calls, which take no lock
    )


def _begin_traced(begin: Callable[[], None]) -> None:
    begin()
    _ptrace(_PTRACE_TRACEME, 0)


def _wait_until_loaded(process: subprocess.Popen[bytes]) -> None:
    _, status = os.waitpid(process.pid, 0)
    if not os.WIFSTOPPED(status):
        process.returncode = os.waitstatus_to_exitcode(status)
        raise OSError(f"the process ended with code {process.returncode}")


def _ptrace(request: int, pid: int) -> None:
    if _LIBC.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, None) == -1:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))


def _bounds(pid: int) -> tuple[int, int, int, int]:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    first, second, third, fourth = map(int, fields[_FIRST_FIELD : _FIRST_FIELD + 4])
    return first, second, third, fourth


def _stack(pid: int) -> int:
    """Where it begins."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return next(int(line.partition("-")[0], 16) for line in lines if line.endswith("[stack]"))


def _read(memory: BinaryIO, begin: int, end: int) -> bytes:
    memory.seek(begin)
    return memory.read(end - begin)


def _write(memory: BinaryIO, at: int, data: bytes) -> None:
    memory.seek(at)
    memory.write(data)
