"""Iceberg tables: units are files beside the table, and the run adds all of them in one snapshot at its end.

Workers write to the folder `_graphkiln` of the table, whose name hides it from Iceberg's removal of orphan files; notes
and lock are there, too. Readers see nothing of a run, or all of it.

The snapshot carries the id of its commit. The id is noted before the commit, so that the next driver knows which
snapshot to look for if this one is killed or loses the response. A commit is based on a snapshot that was searched for
the id: if another writer, or a late request of a dead driver, is first, the catalog refuses it, and the new snapshot is
searched again. So the files are added once, at whatever moment a process is killed.
Source: "Optimistic Concurrency" of the Iceberg table specification.
"""

from __future__ import annotations

import json
import logging
import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from graphkiln_backend.scoring.destinations.base import Result
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import RESULT, ParquetDestination, encode_result, object_name
from graphkiln_backend.scoring.destinations.store import Store
from graphkiln_backend.scoring.errors import CommitConflict, ScoringError, StoreError
from graphkiln_backend.scoring.iceberg import ResultTable, TableName, writable_schema
from graphkiln_backend.scoring.sources.base import digest
from graphkiln_backend.storage.address import RemoteAddress

FOLDER = "_graphkiln"
COMMIT_NOTE = "_commit.json"
PROPERTY = "graphkiln.commit"  # of a snapshot: id of the commit that made it
_RETIRED = re.compile(r"_retired-(.+)")  # notes named after units that were in the table
_ATTEMPTS = 20
_PAUSE_S, _MAX_PAUSE_S = 0.2, 10.0
_S3 = {"s3.access-key-id": "key", "s3.secret-access-key": "secret", "s3.session-token": "token"}
_log = logging.getLogger("graphkiln.scoring")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Commit:
    """The newest commit, as noted before and after it.

    Attributes:
        id: Unique id, a property of its snapshot.
        plan: Digest of the planned units.
        base: The snapshot that it replaces; None if the table has none.
        before: Units in the table before it.
        units: Units in the table after it.
        snapshot: Snapshot of the commit; None if it is not known yet.
    """

    id: str
    plan: str
    base: int | None
    before: int
    units: int
    snapshot: int | None = None


class IcebergDestination(ParquetDestination):
    """A table, created before the first unit. Loaded when it is used.

    Args:
        name: The table.
    """

    def __init__(self, name: TableName) -> None:
        if name.snapshot:
            raise ScoringError(f"results cannot be written to snapshot {name.snapshot}", hint=f"use {name.text}")
        self._name = name
        self._declared: Callable[[], pa.Schema] | None = None
        self._file_columns = cache(lambda schema: self._loaded().check_columns(schema))  # one request per process

    def declare(self, columns: Callable[[], pa.Schema]) -> None:
        """Keep the function, which `prepare` calls."""
        self._declared = columns

    @property
    def exists(self) -> bool:
        """True if the table exists."""
        return ResultTable.load(self._name) is not None

    @cached_property
    def _store(self) -> Store:  # type: ignore[override]
        return store_of(self._loaded())

    def prepare(self) -> None:
        """Create the table if it is missing, and probe its store.

        Raises:
            ScoringError: It has other columns than the results, or was rewritten by another program.
        """
        table = ResultTable.load(self._name)
        if self._declared is not None:
            columns = self._declared()
            table = table or ResultTable.create(self._name, columns)
            table.check_columns(columns)
        super().prepare()
        self._refuse_rewritten(self._loaded())

    def committed_ids(self) -> Iterator[str]:
        """Yield units with a file, in the table or not, except those that left the table."""
        names = list(self._store.names())
        retired = {found[1] for name in names if (found := _RETIRED.fullmatch(name))}
        return (found[1] for name in names if (found := RESULT.fullmatch(name)) and found[1] not in retired)

    def visible_ids(self) -> Iterator[str]:
        """Yield the units in the table's newest snapshot."""
        table = self._loaded()
        self._refuse_rewritten(table)
        return iter(self._units_in(table))

    def commit(self, result: Result) -> None:
        """Create the unit's file exclusively, with the columns and field ids of the table."""
        table = self._typed(result.table)
        content = encode_result(replace(result, table=table), attempt=uuid.uuid4().hex)
        created = self._store.create(object_name(result.unit_id), content)
        retired = f"_retired-{result.unit_id}"
        if self._store.read(retired) is not None:  # it is part of the input again
            self._store.delete(retired)
        elif not created:
            raise CommitConflict(f"unit {result.unit_id} has a result already")

    def remove(self, unit_ids: Iterable[str]) -> None:
        """Delete files that are not in the table; the others leave it with the next commit.

        Older snapshots keep them.
        """
        present = self._units_in(self._loaded())
        for unit_id in unit_ids:
            if unit_id in present:
                self._store.replace(f"_retired-{unit_id}", memoryview(b"{}"))
            else:
                self._store.delete(object_name(unit_id))

    def publish(self, unit_ids: Iterable[str], check: Callable[[], None]) -> None:
        """Add the files of all planned units that the table lacks, and remove those of others, in one snapshot.

        Raises:
            ScoringError: It cannot be known if an earlier commit succeeded, or the table was rewritten.
            StoreError: The catalog does not answer, or others commit all the time.
        """
        planned = frozenset(unit_ids)
        plan = digest(*sorted(planned))
        last = self._settled()
        if last is not None and last.snapshot is not None and last.plan == plan:
            return
        if last is not None and last.snapshot is None and last.plan == plan:
            commit = last  # under its id, because its request may still arrive
        else:
            before = 0 if last is None else last.before if last.snapshot is None else last.units
            commit = _Commit(id=uuid.uuid4().hex, plan=plan, base=None, before=before, units=len(planned))
        for attempt in range(_ATTEMPTS):
            check()
            try:
                snapshot = self._try_commit(commit, planned)
            except StoreError as error:
                # Another writer was first, or the outcome is unknown: the next attempt looks for the snapshot.
                if attempt == _ATTEMPTS - 1 or not error.passing:
                    raise
                _log.warning("%s: the commit is tried again: %s", self._name.text, error)
                time.sleep(min(_PAUSE_S * 2**attempt, _MAX_PAUSE_S) * random.uniform(0.5, 1.0))  # noqa: S311
            else:
                self._note(replace(commit, snapshot=snapshot))
                return

    def unpublished(self) -> str:
        """Say how many units wait for the commit."""
        table = self._loaded()
        waiting = set(self.committed_ids()) - self._units_in(table).keys()
        if not waiting:
            return ""
        return (
            f"{len(waiting)} units are finished in {self._folder(table)}, but not in {self._name.text}, which gets all "
            "of them at the end: the same command goes on; to give up, delete them"
        )

    def _try_commit(self, commit: _Commit, planned: frozenset[str]) -> int:
        """Commit unless the newest snapshots have the commit; return the id of its snapshot."""
        table = self._loaded()
        if (found := table.find_snapshot(PROPERTY, commit.id)) is not None:
            return found
        present = self._units_in(table)
        if len(present) != commit.before:
            raise self._rewritten(len(present), commit.before)
        self._note(replace(commit, base=table.head))
        added = [f"{self._folder(table)}/{object_name(unit_id)}" for unit_id in sorted(planned - present.keys())]
        removed = [file for unit_id, file in present.items() if unit_id not in planned]
        return table.commit(added, removed, {PROPERTY: commit.id})

    def _settled(self) -> _Commit | None:
        """Return the newest commit; that of a driver that was killed with its snapshot, if it succeeded."""
        last = self._last_commit()
        if last is None or last.snapshot is not None:
            return last
        table = self._loaded()
        if (found := table.find_snapshot(PROPERTY, last.id)) is not None:
            last = replace(last, snapshot=found)
            self._note(last)
            return last
        if not table.keeps_successor(last.base):
            raise ScoringError(
                f"a driver was killed while it added results to {self._name.text}, and snapshots have been expired "
                "since: it cannot be known if they were added",
                hint="choose another destination",
            )
        _log.warning(
            "%s: a driver was killed during its commit, before the table had it; metadata files that it may have left "
            "are removed by remove_orphan_files",
            self._name.text,
        )
        return last

    def _rewritten(self, count: int, expected: int) -> ScoringError:
        return ScoringError(
            f"{self._name.text} was rewritten by another program: of {expected} files of units it has {count}",
            hint="compact or change a table when its runs are over; choose another destination for new ones",
        )

    def _refuse_rewritten(self, table: ResultTable) -> None:
        """Refuse a table whose files are no longer those of the newest commit, because they could be added twice."""
        last = self._last_commit()
        if last is not None and last.snapshot is not None:
            count = len(self._units_in(table))
            if count != last.units:
                raise self._rewritten(count, last.units)

    def _loaded(self) -> ResultTable:
        table = ResultTable.load(self._name)
        if table is None:
            raise ScoringError(f"there is no table {self._name.text}", hint="name the --out of a run")
        return table

    def _typed(self, results: pa.Table) -> pa.Table:
        columns = self._file_columns(results.schema)
        return results.cast(writable_schema(results.schema), safe=False).select(columns.names).cast(columns)

    def _units_in(self, table: ResultTable) -> dict[str, Any]:
        files = table.files_below(self._folder(table))
        return {found[1]: file for name, file in files.items() if (found := RESULT.fullmatch(name))}

    @staticmethod
    def _folder(table: ResultTable) -> str:
        return f"{table.location.rstrip('/')}/{FOLDER}"

    def _last_commit(self) -> _Commit | None:
        content = self._store.read(COMMIT_NOTE)
        return _Commit(**json.loads(content)) if content else None

    def _note(self, commit: _Commit) -> None:
        self._store.replace(COMMIT_NOTE, memoryview(json.dumps(asdict(commit)).encode()))


def store_of(table: ResultTable) -> Store:
    """Open the folder for results beside a table.

    Raises:
        ScoringError: Its file system has no exclusive creation.
    """
    location = f"{table.location.rstrip('/')}/{FOLDER}"
    scheme, colon, rest = location.partition(":")
    if location.startswith("/") or (colon and scheme == "file"):
        return FolderStore(Path(location if location.startswith("/") else unquote("/" + rest.lstrip("/"))))
    if scheme in {"s3", "s3a", "s3n"}:
        return ObjectStore(
            RemoteAddress(scheme="s3", root=rest.strip("/"), options=_s3_options(table.properties), text=location)
        )
    if scheme in {"gs", "gcs"}:
        return ObjectStore(RemoteAddress(scheme="gs", root=rest.strip("/"), text=location))
    raise ScoringError(
        f"{location} is not supported as a destination", hint="use a table on s3://, gs:// or a file system"
    )


def _s3_options(properties: Mapping[str, str]) -> dict[str, Any]:
    options: dict[str, Any] = {own: properties[key] for key, own in _S3.items() if key in properties}
    if "s3.endpoint" in properties:
        options["endpoint_url"] = properties["s3.endpoint"]
    if "s3.region" in properties:
        options["client_kwargs"] = {"region_name": properties["s3.region"]}
    return options
