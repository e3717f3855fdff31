"""Programs to copy: they are valid, whatever the names are. That they work is shown by the browser's tests."""

from __future__ import annotations

import ast
import asyncio
import json
import shlex
import subprocess
import sys
from typing import Any

import pytest
from shown_server import Shown, config
from task_outputs import DETECTION, EMBEDDING, SEGMENTATION

from graphkiln.page.snippets import snippets
from graphkiln_backend.graph.task import Task

URL = "http://127.0.0.1:8000"


def programs(shown: Shown, *, url: str = URL, shapes: Any = None) -> dict[str, str]:
    return snippets(url, asyncio.run(shown.server().served("m", "1")), shapes or {})


def tensors(shown: Shown, *rows: tuple[str, str, list[int]]) -> None:
    inputs = [{"name": name, "datatype": datatype, "shape": shape} for name, datatype, shape in rows]
    shown.transport.responses |= {
        "model_config": config(takes_images=False),
        "model_metadata": {"inputs": inputs, "outputs": []},
    }


def test_an_image_is_classified(shown: Shown) -> None:
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
def test_names_of_tensors_stay_names(shown: Shown, name: str) -> None:
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


def test_curl_sends_what_the_signature_says(shown: Shown) -> None:
    tensors(shown, ("X", "FP32", [-1, 2]), ("T", "BYTES", [1]), ("B", "BOOL", [2]))
    program = shlex.split(programs(shown, shapes={"X": [1, 2]})["curl"])[2]
    sent = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, text=True).stdout
    assert json.loads(sent)["inputs"] == [
        {"name": "X", "shape": [1, 2], "datatype": "FP32", "data": [0, 0]},
        {"name": "T", "shape": [1], "datatype": "BYTES", "data": ["text"]},
        {"name": "B", "shape": [2], "datatype": "BOOL", "data": [False, False]},
    ]


@pytest.mark.parametrize("half", ["FP16", "BF16"])
def test_json_has_no_half_precision(shown: Shown, half: str) -> None:
    tensors(shown, ("X", half, [1]))
    found = programs(shown)
    assert "curl" not in found
    assert ("ml_dtypes" in found["tritonclient"]) == (half == "BF16")


def test_a_server_with_tls(shown: Shown) -> None:
    assert "ssl=True" in programs(shown, url="https://127.0.0.1:8000")["tritonclient"]
