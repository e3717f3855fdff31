"""Example programs are valid for all names; the browser tests run them."""

from __future__ import annotations

import ast
import asyncio
import json
import shlex
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from shown_server import Shown, config
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION

from graphkiln.page.server import read_published
from graphkiln.page.snippets import snippets
from graphkiln_backend.graph.task import Task

URL = "http://127.0.0.1:8000"


def programs(shown: Shown, *, url: str = URL, shapes: Any = None) -> dict[str, str]:
    return snippets(url, asyncio.run(read_published(shown.server().model("m", "1"))), shapes or {})


def tensors(shown: Shown, *rows: tuple[str, str, list[int]]) -> None:
    inputs = [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in rows]
    shown.transport.responses |= {
        "model_config": config(takes_images=False),
        "model_metadata": {"inputs": inputs, "outputs": []},
    }


def test_image_is_classified(shown: Shown) -> None:
    found = programs(shown)
    assert list(found) == ["Python", "tritonclient", "curl"]
    assert ".model('m', '1').classify(image)" in found["Python"]


@pytest.mark.parametrize(("task", "verb"), [(DETECTION, "detect"), (SEGMENTATION, "segment"), (EMBEDDING, "embed")])
def test_other_tasks(shown: Shown, task: Task, verb: str) -> None:
    shown.transport.responses["model_config"] = config(task)
    found = programs(shown)["Python"]
    ast.parse(found)
    assert f".{verb}(image)" in found


@pytest.mark.parametrize("name", ["X", "it's", '"; import os #', "a\nb", "$(reboot)", "\\"])
def test_hostile_tensor_names(shown: Shown, name: str) -> None:
    tensors(shown, (name, "INT64", [-1, 3]))
    found = programs(shown)
    for language in ("Python", "tritonclient"):
        tree = ast.parse(found[language])
        assert name in {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert "os" not in {
            alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
        }
    words = shlex.split(found["curl"])
    assert words[:2] == ["python3", "-c"]
    ast.parse(words[2])


def test_curl_request(shown: Shown) -> None:
    tensors(shown, ("X", "FP32", [-1, 2]), ("T", "BYTES", [1]), ("B", "BOOL", [2]))
    sent = sent_by(programs(shown, shapes={"X": [1, 2]})["curl"])
    assert json.loads(sent)["inputs"] == [
        {"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [0, 0]},
        {"name": "T", "shape": [1], "datatype": "BYTES", "data": ["text"]},
        {"name": "B", "shape": [2], "datatype": "BOOL", "data": [False, False]},
    ]


def sent_by(program: str) -> bytes:
    """Run the first command of a shell pipe."""
    words = shlex.split(program.partition(" |\n")[0])
    return subprocess.run([sys.executable, *words[1:]], capture_output=True, check=True).stdout


@pytest.mark.parametrize("half", ["FP16", "BF16"])
def test_curl_sends_half_precision_as_binary(shown: Shown, half: str) -> None:
    tensors(shown, ("X", half, [-1, 3]), ("T", "BYTES", [2]), ("B", "BOOL", [1]))
    found = programs(shown)
    assert ("ml_dtypes" in found["tritonclient"]) == (half == "BF16")
    header = "Inference-Header-Content-Length: "
    words = shlex.split(found["curl"])
    (length,) = [int(word.removeprefix(header)) for word in words if word.startswith(header)]
    sent = sent_by(found["curl"])
    document = json.loads(sent[:length])
    sizes = [row["parameters"]["binary_data_size"] for row in document["inputs"]]
    assert sizes == [6, 16, 1]
    assert sent[length:] == bytes(6) + b"\x04\0\0\0text" * 2 + b"\0"
    assert document["parameters"] == {"binary_data_output": True}
    assert [row["datatype"] for row in document["inputs"]] == [half, "BYTES", "BOOL"]


def test_half_precision_output_is_binary(shown: Shown) -> None:
    tensors(shown, ("X", "FP32", [1]))
    shown.transport.responses["model_metadata"]["outputs"] = [{"name": "Y", "datatype": "FP16", "shape": [1]}]
    assert "binary_data_output" in programs(shown)["curl"]


def test_curl_prints_binary_response(shown: Shown) -> None:
    tensors(shown, ("X", "FP16", [1]))
    printing = shlex.split(programs(shown)["curl"].rpartition(" |\n")[2])
    for response, code, printed in ((b'{"outputs": []}\xff\0', 0, b"{'outputs': []}"), (b'{"error": "no"}', 1, b"no")):
        ran = subprocess.run([sys.executable, *printing[1:]], input=response, capture_output=True, check=False)
        assert (ran.returncode, printed in ran.stdout) == (code, True)


def sequences(shown: Shown, datatype: str) -> None:
    tensors(shown, ("X", "INT32", [1]))
    control = [{"kind": "CONTROL_SEQUENCE_CORRID", "data_type": datatype}]
    batching = {"control_input": [{"name": "ID", "control": control}]}
    shown.transport.responses["model_config"] = {"max_batch_size": 4, "sequence_batching": batching}


@pytest.mark.parametrize(("datatype", "kind"), [("TYPE_UINT64", int), ("TYPE_STRING", str)])
def test_sequence_model_programs(shown: Shown, datatype: str, kind: type) -> None:
    sequences(shown, datatype)
    found = programs(shown)
    assert list(found) == ["tritonclient", "curl"], "our client has no sequences"
    parameters = json.loads(sent_by(found["curl"]))["parameters"]
    assert type(parameters["sequence_id"]) is kind
    assert 0 < int(parameters["sequence_id"]) < 1 << 31
    assert (parameters["sequence_start"], parameters["sequence_end"]) == (True, True)
    assert "sequence_start=True, sequence_end=True" in found["tritonclient"]
    assert programs(shown)["curl"] != found["curl"], "another id: the sequences of others go on"


def test_decoupled_model_has_no_program(shown: Shown) -> None:
    shown.transport.responses["model_config"] = {"max_batch_size": 0, "model_transaction_policy": {"decoupled": True}}
    assert programs(shown) == {}


def test_no_tritonclient_program_for_escaped_name(shown: Shown) -> None:
    """Triton does not unescape paths."""
    served = replace(asyncio.run(read_published(shown.server().model("m", "1"))), model="a%20=b")
    found = snippets(URL, served, {})
    assert list(found) == ["Python", "curl"]
    assert "/v2/models/a%20=b/versions/1/infer" in found["curl"]


def test_server_with_tls(shown: Shown) -> None:
    assert "ssl=True" in programs(shown, url="https://127.0.0.1:8000")["tritonclient"]
