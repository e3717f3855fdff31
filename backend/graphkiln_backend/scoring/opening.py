"""Which source and which destination a text names."""

from __future__ import annotations

from graphkiln_backend.scoring.destinations.addresses import destination_at
from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.encoders.choice import RESERVED
from graphkiln_backend.scoring.errors import ScoringError
from graphkiln_backend.scoring.request import ScoreRequest
from graphkiln_backend.scoring.sources.base import Source
from graphkiln_backend.scoring.sources.files import FileSource
from graphkiln_backend.scoring.sources.reader import Columns

_POSTGRES = ("postgresql://", "postgres://")


def open_source(request: ScoreRequest) -> Source:
    """The source of a run.

    Raises:
        ScoringError: Its text names nothing that can be read, or its columns are none that can be.
    """
    if taken := [name for name in RESERVED if name in request.keep_columns]:
        raise ScoringError(f"the output has a column '{taken[0]}' of its own", hint="rename it in the input")
    columns = Columns(image=request.image_column, id=request.id_column, kept=request.keep_columns)
    if request.source.startswith(_POSTGRES):
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
