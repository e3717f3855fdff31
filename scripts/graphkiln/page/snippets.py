"""Example programs that send a request to a version, with its names and shapes."""

from __future__ import annotations

import json
import math
import secrets
import shlex
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from graphkiln.page.server import kind_of
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.text import in_path
from graphkiln_client.published import ServedVersion

_BY_SCORE = "print(found.label or found.index, found.score)"
# By task: the method, and a statement that prints its result.
_VERBS = {
    "classification": ("classify", f"for found in answer.classifications:\n        {_BY_SCORE}"),
    "detection": ("detect", f"for found in answer:\n        {_BY_SCORE}"),
    "segmentation": (
        "segment",
        "for index in answer.present:\n        print(answer.label(index), answer.share(index))",
    ),
    "embedding": ("embed", "print(answer.shape)"),
}
_HALF = {DType.FP16, DType.BF16}  # not supported by JSON
# A BYTES element with its length. Source: KServe v2, binary tensor data extension.
_TEXT = b"\x04\0\0\0text"
# Prints the JSON header of a binary response, or the error.
_PRINT_HEADER = (
    "import json, sys; answer = sys.stdin.buffer.read().decode('latin-1'); "
    "header, _ = json.JSONDecoder().raw_decode(answer); print(header); sys.exit('error' in header)"
)
_SIDE = 224


def snippets(url: str, served: ServedVersion, shapes: Mapping[str, Sequence[int]]) -> dict[str, str]:
    """Generate programs that send a request to a version.

    Args:
        url: URL of the server.
        served: Published metadata of the version.
        shapes: Shapes of inputs by name, in place of those in the metadata.

    Returns:
        Programs by client: `Python` (our client, not for sequence models), `tritonclient` (not for names that it
        escapes, because Triton does not unescape them) and `curl`. Empty for a decoupled model, which streams over
        gRPC.

    Raises:
        ProtocolError: The published metadata is malformed.
    """
    if served.config.get("model_transaction_policy", {}).get("decoupled"):
        return {}
    rows = [(row["name"], DType(row["datatype"]), _shape(row, shapes)) for row in served.metadata["inputs"]]
    sequence, curl = _sequence(served.config), _binary_curl if _has_half(served) else _curl
    kind = kind_of(served)
    ours = _image_program(url, served, kind) if kind else _tensor_program(url, served, rows)
    theirs = _triton_program(url, served, rows, sequence)
    return {
        **({} if sequence else {"Python": ours}),
        **({"tritonclient": theirs} if quote(served.model) == served.model else {}),
        "curl": curl(url, served, rows, sequence),
    }


_Rows = Sequence[tuple[str, DType, list[int]]]
_Sequence = Mapping[str, int | str | bool]


def _shape(row: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> list[int]:
    known = shapes.get(row["name"])
    return list(known) if known else [max(1, size) for size in row["shape"]]


def _has_half(served: ServedVersion) -> bool:
    rows = (*served.metadata["inputs"], *served.metadata.get("outputs", ()))
    return any(row["datatype"] in _HALF for row in rows)


def _sequence(config: Mapping[str, Any]) -> _Sequence:
    """Return the parameters of a sequence of one request with a random id; empty for other models."""
    batching = config.get("sequence_batching")
    if batching is None:
        return {}
    controls = [control for row in batching.get("control_input", ()) for control in row.get("control", ())]
    number = secrets.randbelow((1 << 31) - 1) + 1
    is_text = any(control.get("data_type") == "TYPE_STRING" for control in controls)
    return {"sequence_id": str(number) if is_text else number, "sequence_start": True, "sequence_end": True}


def _image_program(url: str, served: ServedVersion, kind: str) -> str:
    verb, shown = _VERBS[kind]
    return f"""\
import numpy as np
from graphkiln_client import Client

image = np.full(({_SIDE}, {_SIDE}, 3), 128, np.uint8)  # or a path: "photo.jpg"
with Client({url!r}) as client:
    answer = client.model({served.model!r}, {served.version!r}).{verb}(image)
    {shown}
"""


def _tensor_program(url: str, served: ServedVersion, rows: _Rows) -> str:
    inputs = ", ".join(f"{name!r}: {_array(dtype, shape)}" for name, dtype, shape in rows)
    return f"""\
{_imports(rows)}from graphkiln_client import Client

with Client({url!r}) as client:
    outputs = client.model({served.model!r}, {served.version!r}).infer({{{inputs}}})
    for name, array in outputs.items():
        print(name, array.dtype, array.shape)
"""


def _triton_program(url: str, served: ServedVersion, rows: _Rows, sequence: _Sequence) -> str:
    scheme, _, authority = url.partition("://")
    secured = ", ssl=True" if scheme == "https" else ""
    more = "".join(f", {key}={value!r}" for key, value in sequence.items())
    inputs = "\n".join(
        f"inputs.append(triton.InferInput({name!r}, {shape}, {dtype.value!r}))\n"
        f"inputs[-1].set_data_from_numpy({_array(dtype, shape)})"
        for name, dtype, shape in rows
    )
    return f"""\
{_imports(rows)}import tritonclient.http as triton

client = triton.InferenceServerClient({authority!r}{secured})
inputs = []
{inputs}
result = client.infer({served.model!r}, inputs, model_version={served.version!r}{more})
for output in result.get_response()["outputs"]:
    print(output["name"], result.as_numpy(output["name"]).shape)
client.close()
"""


def _curl(url: str, served: ServedVersion, rows: _Rows, sequence: _Sequence) -> str:
    inputs = ", ".join(
        f'{{"name": {json.dumps(name)}, "shape": {shape}, "datatype": "{dtype}", "data": {_values(dtype, shape)}}}'
        for name, dtype, shape in rows
    )
    more = f', "parameters": {dict(sequence)}' if sequence else ""
    program = f'import json; print(json.dumps({{"inputs": [{inputs}]{more}}}))'
    return f"{_python(program)} |\n  {_post(url, served)}\n"


def _binary_curl(url: str, served: ServedVersion, rows: _Rows, sequence: _Sequence) -> str:
    """Send tensors after the JSON header. Source: KServe v2, binary tensor data extension."""
    inputs = [
        {"name": name, "shape": shape, "datatype": dtype, "parameters": {"binary_data_size": _size(dtype, shape)}}
        for name, dtype, shape in rows
    ]
    head = json.dumps({"inputs": inputs, "parameters": {**sequence, "binary_data_output": True}}).encode()
    body = " + ".join(_raw(dtype, shape) for _, dtype, shape in rows)
    length = shlex.quote(f"Inference-Header-Content-Length: {len(head)}")
    program = f"import sys; sys.stdout.buffer.write({head!r} + {body})"
    return f"{_python(program)} |\n  {_post(url, served, f'-H {length}')} |\n  {_python(_PRINT_HEADER)}\n"


def _python(program: str) -> str:
    return f"python3 -c {shlex.quote(program)}"


def _post(url: str, served: ServedVersion, header: str = "") -> str:
    path = f"{url}/v2/models/{in_path(served.model)}/versions/{served.version}/infer"
    words = ("curl -sS --fail-with-body", header, "--data-binary @-", shlex.quote(path))
    return " ".join(filter(None, words))


def _imports(rows: _Rows) -> str:
    return (
        "import ml_dtypes\nimport numpy as np\n"
        if any(dtype is DType.BF16 for _, dtype, _ in rows)
        else "import numpy as np\n"
    )


def _array(dtype: DType, shape: Sequence[int]) -> str:
    """Return a Python expression for an array of zeros or texts."""
    if dtype is DType.BYTES:
        return f"np.full({list(shape)}, b'text', np.object_)"
    return f"np.zeros({list(shape)}, {'ml_dtypes' if dtype is DType.BF16 else 'np'}.{_numpy_name(dtype)})"


def _numpy_name(dtype: DType) -> str:
    return "bool_" if dtype is DType.BOOL else dtype.numpy.name


def _values(dtype: DType, shape: Sequence[int]) -> str:
    """Return a Python expression for the elements as a flat list."""
    value = '"text"' if dtype is DType.BYTES else "False" if dtype is DType.BOOL else "0"
    return f"[{value}] * {math.prod(shape)}"


def _raw(dtype: DType, shape: Sequence[int]) -> str:
    """Return a Python expression for the elements as binary data."""
    return f"{_TEXT!r} * {math.prod(shape)}" if dtype is DType.BYTES else f"bytes({_size(dtype, shape)})"


def _size(dtype: DType, shape: Sequence[int]) -> int:
    return math.prod(shape) * (dtype.bytes or len(_TEXT))
