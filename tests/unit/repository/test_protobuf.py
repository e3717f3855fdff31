"""Triton's messages come without gRPC, and are those of the whole package."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec

import pytest

from graphkiln_backend.repository import protobuf

PROGRAM = """
import sys
from graphkiln_backend.repository.protobuf import pb
assert "grpc" not in sys.modules and "asyncio" not in sys.modules
import tritonclient.grpc
assert tritonclient.grpc.model_config_pb2 is pb
tritonclient.grpc.service_pb2.ModelConfigResponse(config=pb.ModelConfig(name="m"))
"""


def test_without_grpc_and_the_same_as_with_it() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=120)


def test_the_module_that_is_there_is_taken() -> None:
    assert protobuf._load() is sys.modules["tritonclient.grpc.model_config_pb2"]


def test_without_tritonclient_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "tritonclient.grpc.model_config_pb2")
    monkeypatch.setattr(protobuf, "find_spec", lambda name: find_spec(f"no_{name}"))
    with pytest.raises(ImportError, match="tritonclient"):
        protobuf._load()
