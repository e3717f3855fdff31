"""`graphkiln infer`: tensors from files to a model, outputs into files or onto the screen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_json
from graphkiln.cli.options import ModelName, ModelVersion
from graphkiln_backend.graph.errors import ClientError, InvalidInput

if TYPE_CHECKING:
    from graphkiln_backend.graph.dtypes import AnyArray
    from graphkiln_client import Model


@with_connection()
def infer(
    model: ModelName,
    input_: Annotated[
        list[str],
        typer.Option(
            "--input",
            help="A tensor: an .npy file, - for standard input, or JSON such as 'x=[[1, 2]]'; FILE.npz for all.",
            metavar="NAME=VALUE",
        ),
    ],
    output: Annotated[list[str] | None, typer.Option(help="Only this output; may be repeated.", metavar="NAME")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Write each output to DIR/NAME.npy.", metavar="DIR")] = None,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    as_json: Annotated[bool, typer.Option("--json", help="Print all values as JSON.")] = False,
) -> None:
    """Send tensors to a model, and print or write its outputs."""
    from graphkiln.cli.tensor_input import parse_inputs, to_feeds

    given = parse_inputs(input_)
    with connection.connect() as client:
        opened = client.model(model, version)
        feeds = to_feeds(given, opened)
        try:
            outputs = opened.infer(feeds, output or ())
        except InvalidInput as error:
            error.hint = error.hint or _declared(opened)
            raise
    if output_dir:
        _write(outputs, output_dir)
    if as_json:
        print_json(
            {
                name: {"dtype": str(array.dtype), "shape": list(array.shape), "data": _readable(array).tolist()}
                for name, array in outputs.items()
            }
        )
    elif not output_dir:
        for name, array in outputs.items():
            typer.echo(f"{name}: {array.dtype}{list(array.shape)}\n{_readable(array)}")


def _declared(model: Model) -> str:
    """Inputs and outputs of a model; "" if the server does not publish them."""
    try:
        metadata = model.metadata
    except ClientError:
        return ""
    inputs, outputs = (
        ", ".join(f"{row['name']} {row['datatype']}{row['shape']}" for row in metadata[kind])
        for kind in ("inputs", "outputs")
    )
    return f"it takes {inputs} and returns {outputs}; -1: any size"


def _write(outputs: Mapping[str, AnyArray], folder: Path) -> None:
    import numpy as np

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, array in outputs.items():
            path = folder / f"{name.replace('/', '_')}.npy"
            # Texts are object arrays, which .npy could hold as pickled code only.
            np.save(path, array.astype(np.bytes_) if array.dtype == object else array, allow_pickle=False)
            typer.echo(str(path))
    except (OSError, ValueError) as error:  # a server may name an output as it likes
        raise InvalidInput(f"cannot write to {folder}: {getattr(error, 'strerror', '') or error}") from error


def _readable(array: AnyArray) -> AnyArray:
    """Decode text, with replacement characters for what is not UTF-8; other elements stay as they are."""
    import numpy as np

    def to_text(value: object) -> str:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    return np.asarray(np.frompyfunc(to_text, 1, 1)(array), np.object_) if array.dtype.kind in "OS" else array
