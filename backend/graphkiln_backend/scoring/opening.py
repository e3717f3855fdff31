"""Open the source and the destination that a text names."""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from graphkiln_backend.graph.text import redact
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.destinations.folder import FolderStore
from graphkiln_backend.scoring.destinations.object_store import ObjectStore
from graphkiln_backend.scoring.destinations.parquet import ParquetDestination
from graphkiln_backend.scoring.destinations.store import Store
from graphkiln_backend.scoring.encoders import RESERVED
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.sources.base import Columns, Source
from graphkiln_backend.scoring.sources.delta import delta_location
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.storage.address import RemoteAddress

POSTGRES_SCHEMES = ("postgresql://", "postgres://")
FORMS = "a folder, s3://BUCKET/PATH, gs://BUCKET/PATH or postgresql://USER@HOST/DATABASE?table=NAME"
FORMATS = ("", "parquet", "delta")  # what `--format` may be; empty for the destination's own
_OBJECTS = {"s3", "gs"}
_CONDITIONAL = ("s3://", "gs://")  # what may need a ledger, as some stores ignore conditions
_SCHEME = re.compile(r"([a-zA-Z][\w+.-]*)://")


def destination_at(text: str, ledger: str = "", format: str = "") -> Destination:  # noqa: A002 - the flag's name
    """Open a destination; nothing is looked at before it is asked.

    Args:
        text: Its path or address.
        ledger: Address of a database that says which attempt of a unit counts; empty where the store itself can.
        format: `parquet` or `delta`; empty for `parquet`, and for a database, whose format is its tables.

    Raises:
        GraphkilnError: The text names nothing that can be written.
    """
    if format not in FORMATS:
        raise ScoringError(f"--format {format} is not known", hint=f"one of {', '.join(filter(None, FORMATS))}")
    if ledger and (format == "delta" or not text.startswith(_CONDITIONAL)):
        raise ScoringError(f"{redact(text)} decides by itself which attempt counts", hint="leave out --ledger")
    if text.startswith(POSTGRES_SCHEMES):
        if format:
            raise ScoringError(f"a table of PostgreSQL has its own form, not {format}", hint="leave out --format")
        return _table_at(text)
    if (scheme := _SCHEME.match(text)) and scheme[1] not in _OBJECTS:
        raise ScoringError(f"'{redact(text)}' cannot hold results", hint=FORMS)
    if format == "delta":
        return _delta_at(text)
    address = RemoteAddress.parse(text)
    if address is None:
        return ParquetDestination(FolderStore(Path(text)))
    if ledger:
        return _ledgered_at(address, ledger)
    return ParquetDestination(ObjectStore(address))


def _ledgered_at(address: RemoteAddress, ledger: str) -> Destination:
    from graphkiln_backend.scoring.destinations.database import Database
    from graphkiln_backend.scoring.destinations.ledger import LedgeredDestination

    return LedgeredDestination(ObjectStore(address, exclusive=False), Database(ledger))


def _delta_at(text: str) -> Destination:
    from graphkiln_backend.scoring.destinations.delta import DeltaDestination

    address = RemoteAddress.parse(text)
    store: Store = ObjectStore(address) if address else FolderStore(Path(text))
    return DeltaDestination(store, *delta_location(text))


def _table_at(text: str) -> Destination:
    from graphkiln_backend.scoring.destinations.database import Database
    from graphkiln_backend.scoring.destinations.table import TableDestination

    options = dict(parse_qsl(urlsplit(text).query))
    table = options.pop("table", "")
    address = text.partition("?")[0]  # as it is: urlunsplit drops the slashes of an address without a host
    if options:  # libpq takes a plus for a plus
        address += f"?{urlencode(options, quote_via=quote)}"
    return TableDestination(Database(address), table)


def open_source(request: ScoreRequest) -> Source:
    """The source of a run.

    Raises:
        ScoringError: Its text names nothing that can be read, or its columns cannot be.
    """
    if taken := [name for name in RESERVED if name in request.keep_columns]:
        raise ScoringError(f"the output has its own column '{taken[0]}'", hint="rename it in the input")
    columns = Columns(image=request.image_column, id=request.id_column, kept=request.keep_columns)
    if request.source.startswith(POSTGRES_SCHEMES):
        from graphkiln_backend.scoring.sources.postgres import TableSource

        return TableSource(request.source, request.query, columns)
    if request.query:
        raise ScoringError(f"{request.source} is no database", hint="--query is for postgresql://")
    return FileSource(request.source, columns)


def open_destination(request: ScoreRequest) -> Destination:
    """The destination of a run.

    Raises:
        ScoringError: Its text names nothing that can be written.
    """
    return destination_at(request.destination, request.ledger, request.format)
