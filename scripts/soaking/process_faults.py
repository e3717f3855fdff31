"""Faults of processes: killed, stopped, ended."""

from __future__ import annotations

import signal
import time

import psutil

from graphkiln_backend.system import processes
from soaking.fault import Fault, Field, Over, at_once

_ABRUPT_S = 0.5
_PAUSE_S = 8.0


class SignalStub(Fault):
    """A signal to a random instance."""

    def __init__(self, signum: signal.Signals, cause: str) -> None:
        self.name = f"{signum.name} to an instance"
        self.cause = cause
        self._signum = signum

    def inject(self, field: Field) -> Over:
        stubs = field.service.stubs()
        victim = field.chance.choice(stubs)
        victim.send_signal(self._signum)
        return lambda: is_gone(victim) and len(field.service.stubs()) >= len(stubs)


class SignalServer(Fault):
    """A signal to tritonserver."""

    def __init__(self, signum: signal.Signals, cause: str) -> None:
        self.name = f"{signum.name} to tritonserver"
        self.cause = cause
        self._signum = signum

    def inject(self, field: Field) -> Over:
        (victim,) = field.service.servers()
        victim.send_signal(self._signum)
        return lambda: is_gone(victim) and bool(field.service.servers())


class KillSupervisor(Fault):
    """kill -9 of the supervisor, and a fresh start as a service manager does it."""

    name = "SIGKILL to the supervisor, start"
    begins_anew = True

    def inject(self, field: Field) -> Over:
        field.service.signal(signal.SIGKILL)
        field.service.wait_end()
        time.sleep(field.chance.random() * _ABRUPT_S)
        field.service.start()
        return lambda: bool(field.service.servers())


class Terminate(Fault):
    """SIGTERM under traffic, and a start: a rollout."""

    name = "SIGTERM, start"
    begins_anew = True

    def __init__(self) -> None:
        self.ends: list[tuple[int, float]] = []

    def inject(self, field: Field) -> Over:
        self.ends.append(field.service.stop())
        field.service.start()
        return lambda: bool(field.service.servers())


class PauseSupervisor(Fault):
    """The supervisor is stopped for some seconds, as when its machine swaps: what it supervises goes on."""

    name = "supervisor stopped for 8 s"
    heavy = False

    def inject(self, field: Field) -> Over:
        field.service.signal(signal.SIGSTOP)
        try:
            time.sleep(_PAUSE_S)
        finally:
            field.service.signal(signal.SIGCONT)
        return at_once


def is_gone(process: psutil.Process) -> bool:
    """Whether a process has ended, collected by its parent or not."""
    return not process.is_running() or processes.is_gone(process.pid)


def process_faults() -> list[Fault]:
    """One of each."""
    killed = (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT)
    return [
        *(SignalStub(signum, "instance_died") for signum in killed),
        SignalStub(signal.SIGSTOP, "instance_hung"),
        SignalServer(signal.SIGKILL, "server_died"),
        SignalServer(signal.SIGSEGV, "server_died"),
        SignalServer(signal.SIGSTOP, "server_hung"),
        KillSupervisor(),
        Terminate(),
        PauseSupervisor(),
    ]
