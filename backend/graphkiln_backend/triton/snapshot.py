"""Snapshot of all instances, read from their status files (`triton.instance_status`) in one pass."""

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

# `instance.pid`, pid and kind; does not match incomplete `.tmp` files.
_NAME = re.compile(r"(.+\.(\d+))\.(json|counters|loading|fault|crash)", re.DOTALL)

_Content = TypeVar("_Content")
_Files = Mapping[str, Mapping[str, os.DirEntry[str]]]  # kind -> `instance.pid` -> the file


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """Content of status files by `instance.pid`, sorted by it.

    Attributes:
        statuses: Ready instances.
        progress: Counters of ready instances.
        loading: Instances that are being loaded, or died during loading.
        faults: Differences found by instances that computed wrong outputs.
        crashes: Crash records of loading instances.
        ready: Pids of all ready instances, even if their status cannot be read.
    """

    statuses: Mapping[str, InstanceStatus] = field(default_factory=dict)
    progress: Mapping[str, Progress] = field(default_factory=dict)
    loading: Mapping[str, Loading] = field(default_factory=dict)
    faults: Mapping[str, str] = field(default_factory=dict)
    crashes: Mapping[str, str] = field(default_factory=dict)
    ready: frozenset[int] = frozenset()


class SnapshotReader:
    """Read the status files of a folder repeatedly.

    A status never changes, and decoding one takes 0.4 ms, so each is read once. A file that cannot be read is skipped
    and logged once.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._statuses: dict[str, InstanceStatus] = {}
        self._unreadable: set[str] = set()

    def read(self) -> Snapshot:
        """Read all files; those removed meanwhile are skipped."""
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
        """Drop removed instances: a server in poll mode may load thousands in its life."""
        self._statuses = {key: status for key, status in self._statuses.items() if key in files["json"]}
        self._unreadable &= {file.name for kind in files.values() for file in kind.values()}

    def _read_all(
        self, files: Mapping[str, os.DirEntry[str]], read: Callable[[os.DirEntry[str]], _Content]
    ) -> dict[str, _Content]:
        contents = {}
        for key, file in files.items():
            try:
                contents[key] = read(file)
            except FileNotFoundError:  # unloaded after the listing
                continue
            except (OSError, ValueError, struct.error, GraphkilnError) as error:  # truncated, or of another release
                if file.name not in self._unreadable:
                    self._unreadable.add(file.name)
                    _log.warning("ignoring the unreadable status file %s of an instance: %s", file.name, error)
        return contents

    def _read_status(self, file: os.DirEntry[str]) -> InstanceStatus:
        key = file.name.removesuffix(".json")
        if key not in self._statuses:
            self._statuses[key] = decode(InstanceStatus, _read_json(file))
        return self._statuses[key]


def read_snapshot(folder: Path) -> Snapshot:
    """Read the status files of a folder once."""
    return SnapshotReader(folder).read()


def serving_versions(model: str) -> frozenset[int]:
    """Versions of a model with a ready instance; empty if no supervisor started this server."""
    folder = instances_folder()
    statuses = read_snapshot(folder).statuses.values() if folder else ()
    return frozenset(status.version for status in statuses if status.model == model)


def is_ready(folder: Path, key: str) -> bool:
    """Check that an instance is still ready after a snapshot was taken; `key` is its `instance.pid`."""
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
        if match := _NAME.fullmatch(entry.name):
            files[match[3]][match[1]] = entry
    return files


def _read_json(file: os.DirEntry[str]) -> object:
    content: object = json.loads(Path(file).read_bytes())
    return content
