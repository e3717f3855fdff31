"""Settings that the supervisor passes to instances in environment variables, the only channel through Triton."""

from __future__ import annotations

import json
import math
import os
import re
import resource
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.cache.store import DEFAULT_LIMIT_BYTES, ArtifactCache
from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.text import parse_duration, read_size
from graphkiln_backend.lowering.settings import Override

RUN_FOLDER_VARIABLE = "GRAPHKILN_RUN_FOLDER"
SHARED_FOLDER_VARIABLE = "GRAPHKILN_SHARED_FOLDER"
OVERRIDES_VARIABLE = "GRAPHKILN_OVERRIDES"
CACHE_FOLDER_VARIABLE = "GRAPHKILN_CACHE_FOLDER"
CACHE_BYTES_VARIABLE = "GRAPHKILN_CACHE_BYTES"
REPLAY_INTERVAL_VARIABLE = "GRAPHKILN_REPLAY_INTERVAL"
LOG_FORMAT_VARIABLE = "GRAPHKILN_LOG_FORMAT"  # `json` if programs read the log
RECORD_VARIABLE = "GRAPHKILN_RECORDING"  # JSON of `RecordSettings`; empty if nothing is recorded

DEFAULT_REPLAY_INTERVAL_S = 600.0

Overrides = Mapping[str, Sequence[Override]]  # settings of the command line by model name

_SHARE = re.compile(r"(\d+(?:\.\d+)?)(%?)")
_INPUTS = ("full", "digest")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordSettings:
    """Settings of `serve --record`.

    Attributes:
        folder: Absolute path of the record.
        share: Share of requests to record, above 0, at most 1.
        inputs: `full`, or `digest` to record only SHA-256 digests of the inputs.
        keep_s: Seconds to keep a file.
        keep_bytes: Maximum size of all files.
    """

    folder: Path
    share: float = 0.01
    inputs: str = "full"
    keep_s: float = math.inf
    keep_bytes: int = sys.maxsize

    @classmethod
    def parse(cls, folder: Path, share: str, inputs: str, keep: str) -> RecordSettings:
        """Parse options such as `1%`, `full` and `7d,10GB`.

        Raises:
            InvalidInput: An option has another form.
        """
        found = _SHARE.fullmatch(share.strip())
        number = float(found[1]) / (100 if found[2] else 1) if found else 0.0
        if not 0 < number <= 1:
            raise InvalidInput(f"--record-share {share[:40]}: expected a share above 0, such as 1% or 0.01")
        if inputs not in _INPUTS:
            raise InvalidInput(f"--record-inputs {inputs[:40]}: expected {' or '.join(_INPUTS)}")
        keep_s, keep_bytes = math.inf, sys.maxsize
        for part in keep.split(","):
            if size := read_size(part):
                keep_bytes = size
            else:
                keep_s = parse_duration(part, "--record-keep", "7d, or a size such as 10GB, or both: 7d,10GB")
        return cls(folder=folder.absolute(), share=number, inputs=inputs, keep_s=keep_s, keep_bytes=keep_bytes)


def to_environment(
    instances: Path,
    shared: Path,
    overrides: Overrides,
    cache: CacheSettings,
    replay_interval_s: float = DEFAULT_REPLAY_INTERVAL_S,
    *,
    record: RecordSettings | None = None,
) -> dict[str, str]:
    """Build the environment variables of a server.

    Args:
        instances: Folder of status files.
        shared: Folder shared by all instances.
        overrides: Settings of the command line.
        cache: Settings of the artifact cache.
        replay_interval_s: Seconds between two replays of an instance's golden samples; 0 for none.
        record: Settings of recorded requests, or None.
    """
    return {
        RUN_FOLDER_VARIABLE: str(instances),
        SHARED_FOLDER_VARIABLE: str(shared),
        OVERRIDES_VARIABLE: json.dumps({model: list(settings) for model, settings in overrides.items()}),
        CACHE_FOLDER_VARIABLE: str(cache.folder or ""),
        CACHE_BYTES_VARIABLE: str(cache.limit_bytes),
        REPLAY_INTERVAL_VARIABLE: str(replay_interval_s),
        RECORD_VARIABLE: json.dumps({**asdict(record), "folder": str(record.folder)}) if record else "",
    }


def instances_folder() -> Path | None:
    """Folder of status files, or None if no supervisor started this server."""
    return _folder(RUN_FOLDER_VARIABLE)


def shared_folder() -> Path | None:
    """Folder shared by all instances, or None if no supervisor started this server."""
    return _folder(SHARED_FOLDER_VARIABLE)


def overrides_for(model: str) -> list[Override]:
    """Settings of the command line for a model."""
    overrides: dict[str, list[list[str]]] = json.loads(os.environ.get(OVERRIDES_VARIABLE, "{}"))
    return [Override(*override) for override in overrides.get(model, [])]


def replay_interval_s() -> float:
    """Seconds between two replays of an instance's golden samples; 0 for none."""
    return float(os.environ.get(REPLAY_INTERVAL_VARIABLE, DEFAULT_REPLAY_INTERVAL_S))


def record_settings() -> RecordSettings | None:
    """Settings of recorded requests, or None if nothing is recorded."""
    if not (text := os.environ.get(RECORD_VARIABLE)):
        return None
    settings = json.loads(text)
    return RecordSettings(**{**settings, "folder": Path(settings["folder"])})


def open_cache() -> ArtifactCache:
    """Open the server's artifact cache, or a temporary one if the command line disabled it."""
    limit_bytes = int(os.environ.get(CACHE_BYTES_VARIABLE, DEFAULT_LIMIT_BYTES))
    settings = CacheSettings(folder=_folder(CACHE_FOLDER_VARIABLE), limit_bytes=limit_bytes)
    shared = shared_folder() or Path(tempfile.gettempdir()) / f"graphkiln-{os.getpid()}"
    return settings.open(shared / "artifacts")


def lift_memory_limit() -> None:
    """Raise the soft limit on data memory, which `server.limits` set for tritonserver, to the user's hard limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    with suppress(OSError, ValueError):  # the system has no such limit
        resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def be_ended_first() -> None:
    """Have the kernel end this process first if memory runs out. Source: proc(5), `oom_score_adj`."""
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def native_threads() -> frozenset[int]:
    """Ids of the threads that Python does not know; before a model is loaded, the helpers of Triton's stub."""
    known = {thread.native_id for thread in threading.enumerate()} | {os.getpid()}
    return _threads() - known


def run_on_idle_cores(spared: Set[int]) -> None:
    """Have the threads of this process run only while a core has nothing else to do (SCHED_IDLE).

    There is no way back without CAP_SYS_NICE or RLIMIT_NICE, which few servers have: another process must be started.
    New threads inherit the class, so that one which appears during a pass is found by the next.

    Args:
        spared: Threads that keep their class. Helpers of Triton's stub must: if one does not report within a second
            that the stub is alive, tritonserver (24.10) kills the stub, or frees what it reads. A stub that dies with a
            lock of their shared memory ends tritonserver, too: the lock returns EOWNERDEAD, which nobody catches.

    Source: sched(7), "SCHED_IDLE" and "Privileges and resource limits".
    """
    changed = True
    while changed:
        changed = False
        for thread in _threads() - spared:
            with suppress(OSError):  # it has ended, or the system has no such class
                if os.sched_getscheduler(thread) != os.SCHED_IDLE:
                    os.sched_setscheduler(thread, os.SCHED_IDLE, os.sched_param(0))
                    changed = True


def _threads() -> frozenset[int]:
    return frozenset(int(path.name) for path in Path("/proc/self/task").iterdir())


def _folder(variable: str) -> Path | None:
    folder = os.environ.get(variable)
    return Path(folder) if folder else None
