"""Delta Lake tables: the Parquet files of one version of the log; `TABLE@v12` names a version.

Only the driver reads the log. Files in the log are never modified: a new version does not affect a running run, and
appended rows are new units of the next run.
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

from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.sources.places import Place, locate
from graphkiln_backend.scoring.sources.storage import StoredFile
from graphkiln_backend.storage.address import RemoteAddress

LOG = "_delta_log"
_VERSION = re.compile(r"(?P<table>.+)@v(?P<version>\d{1,18})")
# Reader features without effect on the content of a file, or checked below.
_KNOWN_FEATURES = {
    "columnMapping",
    "deletionVectors",
    "timestampNtz",
    "typeWidening",
    "v2Checkpoint",
    "vacuumProtocolCheck",
}
_log = logging.getLogger("graphkiln.scoring")


def delta_location(text: str) -> tuple[str, dict[str, str]]:
    """Location of a table's folder for deltalake, and further options.

    Raises:
        RepositoryError: The address is of an unknown service.
    """
    address = RemoteAddress.parse(text)
    if address is None:
        return text, {}
    endpoint = address.options.get("endpoint_url")
    options = {"aws_endpoint": endpoint, "aws_allow_http": "true"} if endpoint else {}
    if address.scheme == "s3":
        options["aws_conditional_put"] = "etag"
    return f"{address.scheme}://{address.root}", options


@dataclass(frozen=True, slots=True)
class DeltaSource:
    """A table in a folder; by default its newest version."""

    place: Place
    version: int | None

    def files(self) -> Iterator[StoredFile]:
        """List the files of a version, sorted by path.

        Raises:
            ScoringError: The version does not exist, has no rows or a missing file, or uses unsupported features.
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
            if self.version is None:
                which, hint = "", self._way_round
            else:
                which, hint = f" at version {self.version}", "name a version that the log has, or none for the newest"
            raise ScoringError(
                f"the log of the Delta table {self.place.text} cannot be read{which}: {error}", hint=hint
            ) from error

    def _check(self, table: Any) -> None:
        """Refuse a table whose rows are not simply the content of its files."""
        strange = set(table.protocol().reader_features or ()) - _KNOWN_FEATURES
        if table.metadata().configuration.get("delta.columnMapping.mode", "none") != "none":
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
    """Find the table named by a text, if it is one: a folder with a log, optionally with `@v` and a version."""
    if found := _at(text, None):
        return found
    named = _VERSION.fullmatch(text)
    return _at(named["table"], int(named["version"])) if named else None


def _at(text: str, version: int | None) -> DeltaSource | None:
    place = locate(text)
    has_log = next(place.storage.walk(f"{place.path.rstrip('/')}/{LOG}"), None) is not None
    return DeltaSource(place, version) if has_log else None


def _marks(table: Any) -> bool:
    """True if there are, or may be, deletion vectors; older versions of deltalake cannot list them."""
    import deltalake

    try:
        return not hasattr(table, "deletion_vectors") or pa.table(table.deletion_vectors()).num_rows > 0
    except deltalake.exceptions.DeltaError:
        return True
