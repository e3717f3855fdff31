"""A catalog of Iceberg tables in SQLite, as pyiceberg finds it in the environment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg import catalog as pyiceberg_catalog
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.table import Table
from pyiceberg.utils.config import Config

NAME = "lake"


def catalog_variables(folder: Path) -> dict[str, str]:
    """Environment variables that configure the catalog in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"PYICEBERG_CATALOG__{NAME.upper()}"
    return {f"{prefix}__URI": f"sqlite:///{folder}/catalog.db", f"{prefix}__WAREHOUSE": f"file://{folder}/warehouse"}


def configure(variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Set environment variables of pyiceberg, which reads them when it is imported."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(pyiceberg_catalog, "_ENV_CONFIG", Config())


def open_catalog(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Catalog:
    """Configure a catalog with the namespace `shop`."""
    configure(catalog_variables(folder), monkeypatch)
    opened = load_catalog(NAME)
    opened.create_namespace_if_not_exists("shop")
    return opened


def delete_positions(table: Table, path: str, positions: Iterable[int]) -> None:
    """Delete rows by a file of positions, as Spark and Flink do: pyiceberg writes none."""
    place = f"{table.location()}/data/deletes-{len(table.snapshots())}.parquet"
    marks = list(positions)
    schema = pa.schema(
        [
            pa.field("file_path", pa.string(), nullable=False, metadata={"PARQUET:field_id": "2147483546"}),
            pa.field("pos", pa.int64(), nullable=False, metadata={"PARQUET:field_id": "2147483545"}),
        ]
    )
    with table.io.new_output(place).create() as stream:
        pa.parquet.write_table(pa.table([[path] * len(marks), marks], schema=schema), stream)
    add_delete_file(table, place, DataFileContent.POSITION_DELETES, len(marks))


def add_delete_file(
    table: Table, place: str, content: DataFileContent, rows: int, kind: FileFormat = FileFormat.PARQUET, **facts: Any
) -> None:
    """Add a delete file to the newest snapshot of a table."""
    file = next(iter(table.scan().plan_files())).file
    deletes = DataFile.from_args(
        content=content,
        file_path=place,
        file_format=kind,
        partition=file.partition,
        record_count=rows,
        file_size_in_bytes=len(table.io.new_input(place)),
        spec_id=file.spec_id,
        **facts,
    )
    _append_deletes(table, deletes)


def _append_deletes(table: Table, deletes: DataFile) -> None:
    from pyiceberg.manifest import ManifestContent, ManifestEntry, ManifestEntryStatus, ManifestWriterV2
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    class DeletesWriter(ManifestWriterV2):
        def content(self) -> ManifestContent:
            return ManifestContent.DELETES

        @property
        def _meta(self) -> dict[str, str]:
            return {**super()._meta, "content": "deletes"}

    class AppendDeletes(_FastAppendFiles):
        def _manifests(self) -> Any:
            with DeletesWriter(
                self._transaction.table_metadata.spec(),
                self.schema(),
                self.new_manifest_output(),
                self._snapshot_id,
                self._compression,
            ) as writer:
                writer.add(
                    ManifestEntry.from_args(
                        status=ManifestEntryStatus.ADDED,
                        snapshot_id=self._snapshot_id,
                        sequence_number=None,
                        file_sequence_number=None,
                        data_file=deletes,
                    )
                )
            return [writer.to_manifest_file(), *self._existing_manifests()]

    transaction = table.transaction()
    update = transaction.update_snapshot()
    with AppendDeletes(update.fast_append()._operation, transaction, table.io):
        pass
    transaction.commit_transaction()
