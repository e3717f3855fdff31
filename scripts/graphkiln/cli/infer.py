"""`graphkiln infer`: send tensors to a model; print its outputs or write them to files."""

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
            help="Tensor: an .npy file, - for standard input, or JSON such as 'x=[[1, 2]]'; FILE.npz for all inputs.",
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

    with connection.connect() as client:
        opened = client.model(model, version)
        feeds = to_feeds(parse_inputs(input_, opened), opened)
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
    """Describe inputs and outputs of a model; return "" if they are unknown."""
    try:
        metadata = model.metadata
    except ClientError:
        return ""
    inputs, outputs = (
        ", ".join(f"{row['name']} {row['datatype']}{row['shape']}" for row in metadata[kind])
        for kind in ("inputs", "outputs")
    )
    return f"the model takes {inputs} and returns {outputs}; -1: any size"


def _write(outputs: Mapping[str, AnyArray], folder: Path) -> None:
    import numpy as np

    try:
        folder.mkdir(parents=True, exist_ok=True)
        written: set[Path] = set()
        for name, array in outputs.items():
            path = folder / f"{name.replace('/', '_')}.npy"
            while path in written:  # a/b and a_b
                path = path.with_name(f"{path.stem}_.npy")
            written.add(path)
            # strings are object arrays, which .npy can store only with pickle
            np.save(path, array.astype(np.bytes_) if array.dtype == object else array, allow_pickle=False)
            typer.echo(str(path))
    except (OSError, ValueError) as error:  # names of outputs may be invalid file names
        raise InvalidInput(f"cannot write to {folder}: {getattr(error, 'strerror', '') or error}") from error


def _readable(array: AnyArray) -> AnyArray:
    """Decode strings, with replacement characters for invalid UTF-8; return other arrays unchanged."""
    import numpy as np

    def to_text(value: object) -> str:
        return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)

    return np.asarray(np.frompyfunc(to_text, 1, 1)(array), np.object_) if array.dtype.kind in "OS" else array
