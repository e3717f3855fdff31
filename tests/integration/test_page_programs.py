"""The page's example programs, run unchanged on the real server: every type of tensor, scalars, sequences."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote
from urllib.request import ProxyHandler, build_opener

import pytest
import zoo
from onnx import TensorProto, helper
from running import Serving, free_ports

pytestmark = [pytest.mark.server, pytest.mark.slow]

BATCHES = "max_batch_size: 4"
SEQUENCE = """
    max_batch_size: 4
    sequence_batching {
      control_input { name: "ID" control { kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_STRING } }
    }
"""
JSON_TYPES = [name for name in zoo.DTYPES if name not in ("FP16", "BF16")]
# Name -> the languages of its programs, and its outputs.
MODELS = {
    "every": (["Python", "tritonclient", "curl"], {*zoo.DTYPES}),
    "half%20=@out": (["Python", "curl"], {"y"}),
    "json": (["Python", "tritonclient", "curl"], {*JSON_TYPES, "scalar"}),
    "sequence": (["tritonclient", "curl"], {"input", "id"}),
}


def half_out() -> Any:
    nodes = [helper.make_node("Cast", ["x"], ["y"], to=TensorProto.FLOAT16)]
    return zoo.model(nodes, [zoo.value("x", ("batch", 2))], [zoo.value("y", ("batch", 2), TensorProto.FLOAT16)])


def with_scalar() -> Any:
    proto = zoo.identities(JSON_TYPES)
    proto.graph.node.append(helper.make_node("Identity", ["s"], ["scalar"]))
    proto.graph.input.append(zoo.value("s", ()))
    proto.graph.output.append(zoo.value("scalar", ()))
    return proto


def sequence() -> Any:
    nodes = [helper.make_node("Identity", [name], [name.lower()]) for name in ("INPUT", "ID")]
    types = {"INPUT": TensorProto.INT32, "ID": TensorProto.STRING}
    inputs = [zoo.value(name, ("batch", 1), kind) for name, kind in types.items()]
    return zoo.model(nodes, inputs, [zoo.value(name.lower(), ("batch", 1), kind) for name, kind in types.items()])


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Address of the page of a server with these models."""
    store, (port,) = tmp_path_factory.mktemp("store"), free_ports(1)
    zoo.add(store, "every", zoo.identities(zoo.DTYPES), BATCHES)
    zoo.add(store, "json", with_scalar())
    zoo.add(store, "half%20=@out", half_out(), BATCHES)
    zoo.add(store, "sequence", sequence(), SEQUENCE)
    folder = tmp_path_factory.mktemp("log")
    with Serving(folder, "--page", f"127.0.0.1:{port}", "--model-store", store) as server:
        server.wait_ready()
        yield f"http://127.0.0.1:{port}"


def programs_of(page: str, name: str) -> dict[str, str]:
    """Get the programs without the proxy of the environment."""
    with build_opener(ProxyHandler({})).open(f"{page}/api/models/{quote(name, safe='')}/1/snippets") as response:
        programs: dict[str, str] = json.load(response)["snippets"]
    return programs


@pytest.mark.parametrize("name", MODELS)
def test_programs_run_unchanged(page: str, name: str) -> None:
    languages, outputs = MODELS[name]
    programs = programs_of(page, name)
    assert list(programs) == languages
    for language, program in programs.items():
        command = ["bash", "-c", program] if language == "curl" else [sys.executable, "-W", "error", "-c", program]
        ran = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
        assert ran.returncode == 0, f"{language}: {ran.stdout}\n{ran.stderr}"
        assert [output for output in outputs if output not in ran.stdout] == [], f"{language}: {ran.stdout}"


@pytest.mark.parametrize("name", ["every", "json"])
def test_program_fails_with_the_error(page: str, name: str) -> None:
    """Both kinds of curl print the error and exit with its code."""
    program = programs_of(page, name)["curl"].replace("/versions/1/", "/versions/7/")
    ran = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode != 0
    assert "error" in ran.stdout, ran.stderr
