"""`graphkiln similar`: an image in, the images out whose vectors are the nearest to its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json, say
from graphkiln.cli.image_arguments import FORMS, Encoded, check_place
from graphkiln.cli.options import AsJson
from graphkiln.cli.vector_origin import Origin, identify
from graphkiln.scoring.extra import check_extra
from graphkiln_backend.graph.errors import InvalidInput, ModelNotFound

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from graphkiln.cli.vector_search import Found, Neighbor
    from graphkiln_client.encoded_images import Form


@with_connection()
def similar(
    image: Annotated[Path, typer.Argument(help="Image file.", metavar="IMAGE")],
    vectors: Annotated[Path, typer.Option("--in", help="What `graphkiln embed --out` wrote.", metavar="FILE")],
    model: Annotated[
        str, typer.Option(help="Model that embeds the image.", show_default="the one that made the file")
    ] = "",
    version: Annotated[str, typer.Option(help="Its version.", show_default="the one that made the file")] = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    top: Annotated[int, typer.Option(help="How many images, the most similar first.", min=1)] = 5,
    allow_other: Annotated[
        bool, typer.Option("--allow-other", help="Compare although another model, version or contract made the file.")
    ] = False,
    encoded: Encoded = None,
    as_json: AsJson = False,
) -> None:
    """Find the images that are most similar to one.

    Every vector of the file is compared, by the cosine of its angle: nothing is approximated.
    """
    check_place(image)
    check_extra("similar", ["pyarrow"])
    from graphkiln.cli.vector_file import open_vectors
    from graphkiln.cli.vector_search import search

    with open_vectors(vectors) as file:
        name = model or file.origin.model
        of_file = file.origin.version if name == file.origin.model else ""
        asked = (name, version or of_file)
        query = _embed(image, connection, asked, None if allow_other else file.origin, FORMS[encoded])
        if len(query) != file.features:
            raise InvalidInput(f"{vectors} holds vectors of {file.features} features, '{name}' gives {len(query)}")
        found = search(file.chunks(), query, top)
    _tell_skipped(found, vectors)
    if as_json:
        print_json([{"source": each.source, "score": each.score} for each in found.neighbors])
    else:
        _print_table(found.neighbors)


def _tell_skipped(found: Found, vectors: Path) -> None:
    """Says how many vectors could not be compared.

    Raises:
        InvalidInput: None could.
    """
    why = "have no direction: their length is 0 or not finite"
    if not found.neighbors:
        raise InvalidInput(f"{vectors} holds no vectors" if not found.rows else f"all vectors of {vectors} {why}")
    if found.skipped:
        say(f"{found.skipped} of {found.rows} vectors {why}")


def _embed(
    image: Path, connection: ConnectionOptions, asked: tuple[str, str], origin: Origin | None, form: Form
) -> npt.NDArray[np.float32]:
    """The vector of an image.

    Args:
        image: The image.
        connection: To the server.
        asked: Name and version of the model.
        origin: What must make the vector; None for any model.
        form: How the image travels.

    Raises:
        InvalidInput: Something else would.
        ClientError: A request failed.
    """
    try:
        with connection.connect() as client:
            pinned, found = identify(client, *asked, form)
            if origin:
                origin.check(found)
            return pinned.embed(image)
    except ModelNotFound as error:
        if not origin or asked != (origin.model, origin.version):
            raise
        raise ModelNotFound(
            f"the vectors in the file were made by {origin}, which this server does not have: {error.message}",
            hint="embed the images again, or name what to use instead: --version, --model, and --allow-other",
        ) from error


def _print_table(neighbors: Sequence[Neighbor]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table("rank", "score")
    table.add_column("image", overflow="fold")
    for rank, each in enumerate(neighbors, 1):
        table.add_row(str(rank), f"{each.score:.4f}", escape(each.source))
    Console().print(table)
