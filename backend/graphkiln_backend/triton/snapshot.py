"""Snapshot of all instances: their status files (`triton.instance_status`), read in one pass."""

from __future__ import annotations

import json
import logging
import os
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from graphkiln_backend.graph.decoding import decode
from graphkiln_backend.graph.errors import GraphkilnError
from graphkiln_backend.triton.environment import instances_folder
from graphkiln_backend.triton.instance_status import InstanceStatus, Loading, Progress

_log = logging.getLogger("graphkiln.server")

# `instance.pid`, pid and kind; restarts.json is the supervisor's, `.tmp` is not yet whole.
_NAME = re.compile(r"(.+\.(\d+))\.(json|counters|loading|fault|crash)", re.DOTALL)

_Content = TypeVar("_Content")
_Files = Mapping[str, Mapping[str, os.DirEntry[str]]]  # kind -> `instance.pid` -> the file


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Status files by `instance.pid`, in the order of these names.

    Attributes:
        statuses: Ready instances.
        progress: Their counters.
        loading: Instances that are being loaded, or died while they were.
        faults: Differences of those that computed wrong outputs.
        crashes: Crash records of those that are being loaded.
        ready: Pids of all ready instances, also where the status cannot be read.
    """

    statuses: Mapping[str, InstanceStatus] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    loading: Mapping[str, Loading] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    crashes: Mapping[str, str] = field(default_factory=dict)
    ready: frozenset[int] = frozenset()


class SnapshotReader:
    """Read the status files of a folder again and again.

    A status never changes, and decoding one takes 0.4 ms: each is read once. A file that cannot be read is left out and
    logged once, so that the other instances are still seen.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._statuses: dict[str, InstanceStatus] = {}
        self._unreadable: set[str] = set()

    def read(self) -> Snapshot:
        """Read each file; those that vanish meanwhile are left out."""
        files = _list(self._folder)
        self._forget(files)
        return Snapshot(
            statuses=self._read_all(files["json"], self._read_status),
            progress=self._read_all(files["counters"], lambda file: Progress.read(Path(file))),
            loading=self._read_all(files["loading"], lambda file: decode(Loading, _read_json(file))),
            faults=self._read_all(files["fault"], lambda file: Path(file).read_text("utf-8")),
            crashes=self._read_all(files["crash"], lambda file: Path(file).read_text("utf-8", "replace")),
            ready=frozenset(int(key.rpartition(".")[2]) for key in files["json"]),
        )

    def _forget(self, files: _Files) -> None:
        """Drop instances that are gone: a server that polls loads thousands in its life."""
        self._statuses = {key: status for key, status in self._statuses.items() if key in files["json"]}
        self._unreadable &= {file.name for kind in files.values() for file in kind.values()}

    def _read_all(
        self, files: Mapping[str, os.DirEntry[str]], read: Callable[[os.DirEntry[str]], _Content]
    ) -> dict[str, _Content]:
        found = {}
        for key, file in files.items():
            try:
                found[key] = read(file)
            except FileNotFoundError:  # removed between the listing and the reading: unloaded
                continue
            except (OSError, ValueError, struct.error, GraphkilnError) as error:  # cut short, or of another release
                self._warn(file.name, error)
        return found

    def _read_status(self, file: os.DirEntry[str]) -> InstanceStatus:
        key = file.name.removesuffix(".json")
        if key not in self._statuses:
            self._statuses[key] = decode(InstanceStatus, _read_json(file))
        return self._statuses[key]

    def _warn(self, name: str, error: Exception) -> None:
        if name not in self._unreadable:
            self._unreadable.add(name)
            _log.warning("the status file %s of an instance cannot be read and is ignored: %s", name, error)


def read_snapshot(folder: Path) -> Snapshot:
    """Read the status files of a folder once."""
    return SnapshotReader(folder).read()


def serving_versions(model: str) -> frozenset[int]:
    """Versions of a model with a ready instance; none where no supervisor started this server."""
    folder = instances_folder()
    statuses = read_snapshot(folder).statuses.values() if folder else ()
    return frozenset(status.version for status in statuses if status.model == model)


def is_ready(folder: Path, key: str) -> bool:
    """Whether an instance is still ready, after a snapshot was taken; `key` is its `instance.pid`."""
    return (folder / f"{key}.json").exists()


def _list(folder: Path) -> _Files:
    files: dict[str, dict[str, os.DirEntry[str]]] = {
        kind: {} for kind in ("json", "counters", "loading", "fault", "crash")
    }
    try:
        with os.scandir(folder) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
    except FileNotFoundError:
        return files
    for entry in listed:
        if found := _NAME.fullmatch(entry.name):
            files[found[3]][found[1]] = entry
    return files


def _read_json(file: os.DirEntry[str]) -> object:
    content: object = json.loads(Path(file).read_bytes())
    return content
