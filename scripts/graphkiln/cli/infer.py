"""`graphkiln infer`: tensors from files to a model, outputs into files or onto the screen."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln_backend.graph.errors import InvalidInput, ManifestError
from graphkiln_backend.graph.files import GIB, read_bytes, read_stream

if TYPE_CHECKING:
    from graphkiln_backend.graph.dtypes import AnyArray

_STDIN = "-"
_LIMIT = 4 * GIB


@with_connection()
def infer(
    model: Annotated[str, typer.Option(help="Model name.")],
    input_: Annotated[
        list[str],
        typer.Option("--input", help="A tensor from an .npy file, or from standard input (-).", metavar="NAME=FILE"),
    ],
    output: Annotated[list[str] | None, typer.Option(help="Only this output; may be repeated.", metavar="NAME")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Write each output to DIR/NAME.npy.", metavar="DIR")] = None,
    version: Annotated[str, typer.Option(help="Model version.", show_default="the server's choice")] = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    as_json: Annotated[bool, typer.Option("--json", help="Print all values as JSON.")] = False,
) -> None:
    """Send tensors to a model, and print or write its outputs."""
    feeds = dict(read_tensor(text) for text in input_)
    with connection.connect() as client:
        outputs = client.model(model, version).infer(feeds, output or ())
    if output_dir:
        _write(outputs, output_dir)
    if as_json:
        typer.echo(json.dumps({name: _to_json(array) for name, array in outputs.items()}, indent=2))
    elif not output_dir:
        for name, array in outputs.items():
            typer.echo(f"{name}: {array.dtype}{list(array.shape)}\n{_readable(array)}")


def read_tensor(text: str) -> tuple[str, AnyArray]:
    """Reads the tensor of NAME=FILE.

    Returns:
        The name and the array.

    Raises:
        InvalidInput: The text is not NAME=FILE, or the file is not an .npy file of numbers or texts.
    """
    from graphkiln_backend.graph.arrays import parse_npy

    name, equals, file = text.partition("=")
    if not (name and equals and file):
        raise InvalidInput(f"--input {text}: expected NAME=FILE", hint="for example --input INPUT_0=image.npy")
    try:
        is_stdin = file == _STDIN
        content = read_stream(sys.stdin.buffer, _LIMIT) if is_stdin else read_bytes(file, _LIMIT)
        return name, parse_npy(content)
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror or error}") from error
    except ManifestError as error:
        raise InvalidInput(
            f"{file} is not an .npy file of numbers or texts: {error.message}",
            hint=error.hint or "write one with numpy.save",
        ) from error


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


def _to_json(array: AnyArray) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": _readable(array).tolist()}


def _readable(array: AnyArray) -> AnyArray:
    """Text as text, other elements as they are."""
    import numpy as np

    return np.asarray(np.frompyfunc(_to_text, 1, 1)(array), np.object_) if array.dtype.kind in "OS" else array


def _to_text(value: object) -> str:
    """A BYTES element as text; what is not UTF-8 is shown by replacement characters."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
