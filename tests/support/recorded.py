"""Records of requests, written as an instance writes them, and folders that cannot be written."""

from __future__ import annotations

import itertools
import os
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graphkiln_backend.graph.dtypes import AnyArray
from graphkiln_backend.repository.records import Record, RecordedRequest
from graphkiln_backend.triton.environment import RecordSettings
from graphkiln_backend.triton.recording import Origin, Recorder

Pair = tuple[Mapping[str, AnyArray], Mapping[str, AnyArray]]


def origin(**changes: Any) -> Origin:
    """What answers in tests."""
    facts = {"model": "m", "version": 1, "graph_sha256": "0" * 64, "engine": "onnxruntime", "precision": "fp32"}
    return Origin(**{**facts, **changes})


def settings(folder: Path, **changes: Any) -> RecordSettings:
    """Settings that record everything."""
    return RecordSettings(**{"folder": folder, "share": 1.0, **changes})


def write_record(folder: Path, pairs: Iterable[Pair], inputs: str = "full", **changes: Any) -> None:
    """Record pairs of inputs and outputs, as requests `0`, `1`, ..."""
    folder.mkdir(exist_ok=True)
    with Recorder(settings(folder, inputs=inputs), origin(**changes)) as recorder:
        for number, (feeds, outputs) in enumerate(pairs):
            recorder.record(str(number), feeds, outputs, 1e-3)
    assert recorder.dropped == 0


def rows(folder: Path, model: str = "") -> list[RecordedRequest]:
    """All recorded requests."""
    return list(Record.find(folder, model).requests())


def numbered(count: int) -> Iterable[Pair]:
    """Pairs of a request with its number and the double of it."""
    for number in itertools.islice(itertools.count(), count):
        yield {"x": np.full((1, 3), number, np.float32)}, {"y": np.full((1, 3), 2 * number, np.float32)}


FAULTS = {  # method of `Fault` -> reason in the log
    "full": "No space",
    "read_only": "Read-only",
    "removed": "No such file",
    "anothers": "another user",
    "folder_of_the_model": "another user",
}


class Fault:
    """A folder that cannot be written, and its repair."""

    def __init__(self, folder: Path, model: str = "m") -> None:
        self.folder = folder
        self.model = model
        self.stack = ExitStack()

    def mount(self, size: str) -> None:
        command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=700", "none", str(self.folder)]
        if subprocess.run(command, capture_output=True, check=False).returncode != 0:
            pytest.skip("this user may not mount a file system")
        self.stack.callback(subprocess.run, ["umount", str(self.folder)], check=True)

    def full(self) -> None:
        self.mount("64k")

    def read_only(self) -> None:
        self.mount("1m,ro")

    def removed(self) -> None:
        self.folder.rmdir()
        self.stack.callback(self.folder.mkdir)

    def folder_of_the_model(self) -> None:
        (self.folder / self.model).mkdir()
        self.give_away(self.folder / self.model)

    def anothers(self) -> None:
        self.give_away(self.folder)

    def give_away(self, folder: Path) -> None:
        if os.geteuid() != 0:
            pytest.skip("only root may give files away")
        os.chown(folder, 12345, 12345)
        self.stack.callback(os.chown, folder, 0, 0)
