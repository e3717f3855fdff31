"""Modules that an instance imports until it serves; each instance is a process that imports them again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import zoo
from google.protobuf import json_format

from graphkiln_backend.engines.registry import probe
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.plan import Resources
from graphkiln_backend.repository import onnx_file as graph_facts
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.overlay import complete_config
from graphkiln_backend.system.resources import usable_cores
from graphkiln_backend.triton.environment import CACHE_FOLDER_VARIABLE, open_cache

DIGITS = Path(__file__).parents[2] / "model_repository" / "digits"
# Each costs every instance 1 to 50 ms of processor time, and none is needed to serve a model whose cache is filled.
FORBIDDEN = {
    "asyncio",
    "csv",
    "difflib",
    "email",
    "graphkiln_backend.proof.answers",
    "graphkiln_backend.proof.decision",
    "graphkiln_backend.proof.tasks",
    "graphkiln_backend.repository.agreement",
    "graphkiln_backend.repository.records",
    "graphkiln_backend.repository.row_mixing",
    "graphkiln_backend.repository.tensor_outputs",
    "graphkiln_backend.triton.ragged",
    "graphkiln_backend.triton.recording",
    "graphkiln_backend.triton.request_position",
    "graphkiln_backend.triton.rollout",
    "graphkiln_backend.triton.sequences",
    "graphkiln_backend.triton.snapshot",
    "grpc",
    "http",
    "importlib.metadata",
    "multiprocessing",
    "onnx",
    "onnx_ir",
    "onnxscript",
    "openvino",
    "pyarrow",
    "pydantic",
    "rich",
    "socket",
    "statistics",
    "subprocess",
    "typer",
    "typing_extensions",
    "yaml",
}
STUB = """
import json, sys
import fake_triton
sys.modules["triton_python_backend_utils"] = fake_triton
from graphkiln_backend.triton.instance import TritonPythonModel
model = TritonPythonModel()
model.initialize(json.load(open(sys.argv[1])))
print(json.dumps(sorted(sys.modules)))
model.finalize()
"""


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    zoo.add(tmp_path, "bare", zoo.scale(("n", 3)), 'backend: "graphkiln" max_batch_size: 4')
    return tmp_path / "bare"


@pytest.mark.parametrize("kind", ["with a manifest", "bare"])
def test_instance_with_a_warm_cache_imports_only_what_serving_needs(
    bare: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_FOLDER_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(graph_facts, "_known", {})  # what other tests made this process know is not in this cache
    folder = bare if kind == "bare" else DIGITS
    document = complete_config(folder, frozenset({"graphkiln"}), lambda version: version)
    config = ModelConfig.from_protobuf(document, has_gpu=False)
    with open_cache() as cache:
        version = convert_if_needed(folder / "1", cache)
        resources = Resources(device=CPU, cores=usable_cores(), probe=probe)
        Deployment.read(version, config, resources).build(cache).session.close()
    text = json_format.MessageToJson(document, preserving_proto_field_name=True)
    assert sorted(FORBIDDEN & _imported(folder, text, tmp_path)) == []


def _imported(folder: Path, config: str, scratch: Path) -> set[str]:
    """List the modules that an instance has imported when it is ready."""
    arguments = {
        "model_config": config,
        "model_name": folder.name,
        "model_version": "1",
        "model_repository": str(folder),
        "model_instance_name": f"{folder.name}_0",
        "model_instance_kind": "CPU",
        "model_instance_device_id": "0",
    }
    for name, text in (("stub.py", STUB), ("arguments.json", json.dumps(arguments))):
        (scratch / name).write_text(text)
    command = [sys.executable, str(scratch / "stub.py"), str(scratch / "arguments.json")]
    support = str(Path(__file__).parents[1] / "support")
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": support}, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))
