"""A table of Delta Lake as a source: the Parquet files that one version of its log counts.

The log is read by the driver alone. What it names are files that nobody writes again: a version that comes meanwhile
changes nothing of a run, and rows that were appended are new units of the next one. `TABLE@v12` names a version.
Source: the Delta transaction protocol, "Add File and Remove File", "Reader Features".
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa

from graphkiln_backend.scoring.delta_location import delta_location
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.places import Place, locate
from graphkiln_backend.scoring.sources.storage import StoredFile

LOG = "_delta_log"
_VERSION = re.compile(r"(?P<table>.+)@v(?P<version>\d{1,18})")
_KNOWN = {"columnMapping", "deletionVectors", "timestampNtz", "typeWidening", "v2Checkpoint", "vacuumProtocolCheck"}
"""Features for readers that change nothing of what stands in a file, or that are looked for below."""
_MAPPING = "delta.columnMapping.mode"
_log = logging.getLogger("graphkiln.scoring")


@dataclass(frozen=True, slots=True)
class DeltaSource:
    """A table.

    Attributes:
        place: Its folder.
        version: Which of its versions is read; None for the newest.
    """

    place: Place
    version: int | None

    def files(self) -> Iterator[StoredFile]:
        """The files of a version, as they lie in the folder, in the order of their paths.

        Raises:
            ScoringError: It has no such version, no rows, or one of its files is gone; or its files alone do not say
                what its rows are.
        """
        table = self._opened()
        self._check(table)
        named = f"version {table.version()} of the Delta table {self.place.text}"
        waiting = set(map(unquote, pa.table(table.get_add_actions()).column("path").to_pylist()))
        if not waiting:
            raise ScoringError(f"{named} has no rows")
        _log.info("%s: %d files", named, len(waiting))
        for file in self.place.storage.walk(self.place.path):
            if file.path in waiting:
                waiting.discard(file.path)
                yield file
        if waiting:
            raise ScoringError(
                f"{named} counts {len(waiting)} files that are gone, such as {min(waiting)}",
                hint="VACUUM removes files of older versions: score the newest one; a clone is scored where it is of",
            )

    def _opened(self) -> Any:
        import deltalake

        location, options = delta_location(self.place.text)
        try:
            return deltalake.DeltaTable(location, version=self.version, storage_options=options)
        except (deltalake.exceptions.DeltaError, OSError) as error:
            which = "" if self.version is None else f" at version {self.version}"
            raise ScoringError(
                f"the log of the Delta table {self.place.text} cannot be read{which}: {error}", hint=self._way_round
            ) from error

    def _check(self, table: Any) -> None:
        """Refuses a table whose log says more of its rows than which files hold them."""
        strange = set(table.protocol().reader_features or ()) - _KNOWN
        if table.metadata().configuration.get(_MAPPING, "none") != "none":
            strange.add("columnMapping")
        if strange:
            raise ScoringError(
                f"the Delta table {self.place.text} needs a reader that knows {', '.join(sorted(strange))}",
                hint=f"write its rows anew as Parquet; {self._way_round}",
            )
        if "deletionVectors" in (table.protocol().reader_features or ()) and _marks(table):
            raise ScoringError(
                f"the Delta table {self.place.text} has rows that are deleted by marks beside its files",
                hint=f"REORG TABLE ... APPLY (PURGE) writes its files anew; {self._way_round}",
            )

    @property
    def _way_round(self) -> str:
        return f"a pattern takes all rows of all files that are there: '{self.place.text}/**/*.parquet'"


def find_delta(text: str) -> DeltaSource | None:
    """The table that a text means, if it means one: the folder of a log, or that with `@v` and a version behind it."""
    if found := _at(text, None):
        return found
    named = _VERSION.fullmatch(text)
    return _at(named["table"], int(named["version"])) if named else None


def _at(text: str, version: int | None) -> DeltaSource | None:
    place = locate(text)
    has_log = next(place.storage.walk(f"{place.path.rstrip('/')}/{LOG}"), None) is not None
    return DeltaSource(place, version) if has_log else None


def _marks(table: Any) -> bool:
    """Whether a row of a file is deleted, or may be: older versions of deltalake cannot say so."""
    import deltalake

    try:
        return not hasattr(table, "deletion_vectors") or pa.table(table.deletion_vectors()).num_rows > 0
    except deltalake.exceptions.DeltaError:
        return True
