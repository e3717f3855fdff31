"""Exports of PyTorch modules: graph files, and nested inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from converting import Convert
from torch import nn

from graphkiln_backend.repository.version import read_version
from graphkiln_converters.sources.pytorch import export_graph, run_module

pytestmark = pytest.mark.slow


def test_a_graph_file_of_one_input_and_one_output(tmp_path: Path) -> None:
    module, sample = nn.Linear(4, 2), np.ones(4, "f4")
    export_graph(module, sample, tmp_path / "m.onnx", output_name="scores")
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    samples = np.stack([sample] * 5)
    (scores,) = session.run(["scores"], {"INPUT_0": samples})
    np.testing.assert_allclose(scores, run_module(module, samples), rtol=1e-5)
    assert b"stack_trace" not in (tmp_path / "m.onnx").read_bytes()


NESTED = """
import torch

class Step(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = torch.nn.Linear(4, 4)

    def forward(self, token, past):
        return {"present": [tuple(torch.cat([each, self.mix(token)[:, None]], 1) for each in pair) for pair in past]}

def make():
    torch.manual_seed(0)
    return Step(), {"token": torch.zeros(2, 4), "past": [(torch.zeros(2, 5, 4), torch.zeros(2, 5, 4))]}
"""


def test_a_cache_in_lists_and_tuples(run: Convert, tmp_path: Path) -> None:
    """Each tensor is a separate input and output of dynamic length."""
    (tmp_path / "nested.py").write_text(NESTED)
    version = read_version(
        run(
            f"python:{tmp_path / 'nested.py'}:make",
            keep_names=True,
            dynamic=("past_0_0:1=1..9", "past_0_1:1=1..9"),
        )
    )
    assert version.manifest
    signature = version.manifest.signature
    assert [spec.name for spec in signature.inputs] == ["token", "past_0_0", "past_0_1"]
    assert [spec.name for spec in signature.outputs] == ["present_0_0", "present_0_1"]
    assert not isinstance(signature.inputs[1].shape[1], int)
