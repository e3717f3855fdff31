"""Small data sets for scoring with the repository's example model."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from graphkiln_backend.scoring.destinations.base import Destination
from graphkiln_backend.scoring.messages import ScoreRequest
from graphkiln_backend.scoring.plan import open_destination

REPOSITORY = Path(__file__).parents[2]
PLANTED = REPOSITORY / "tests" / "planted"


def make_images(folder: Path, count: int, planted: Mapping[int, bytes] | None = None) -> Path:
    """Make a folder of numbered images, some of which are no images."""
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = np.random.default_rng(number).integers(0, 255, (8, 8), np.uint8)
        content = io.BytesIO()
        Image.fromarray(pixels).save(content, "png")
        (folder / f"{number:05}.png").write_bytes((planted or {}).get(number, content.getvalue()))
    return folder


def make_request(folder: Path, destination: Path, rows_per_unit: int = 10, **options: object) -> ScoreRequest:
    return ScoreRequest(
        source=str(folder),
        model=REPOSITORY / "model_repository" / "digits",
        destination=str(destination),
        backends=frozenset({"graphkiln"}),
        rows_per_unit=rows_per_unit,
        cores_per_worker=1,
        **options,  # type: ignore[arg-type]
    )


def results(destination: Path) -> pa.Table:
    """All rows of a destination, ordered by id."""
    files = sorted(path for path in destination.glob("*.parquet") if not path.name.startswith("_"))
    return pa.concat_tables([pq.read_table(path) for path in files], promote_options="permissive").sort_by("id")


def check_each_once(destination: Path, count: int) -> dict[str, str]:
    """Check that each image has exactly one row; return the errors by row id."""
    table = results(destination)
    assert table.column("id").to_pylist() == [f"{number:05}.png" for number in range(count)]
    rows = zip(table.column("id").to_pylist(), table.column("error").to_pylist(), strict=True)
    return {name: error for name, error in rows if error is not None}


def destination_at(text: str, ledger: str = "", format: str = "") -> Destination:  # noqa: A002 - the flag's name
    """Open a destination."""
    return open_destination(ScoreRequest(source="", model="", destination=text, ledger=ledger, format=format))
