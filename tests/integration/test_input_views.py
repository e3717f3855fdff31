"""Whether the stub of the server at hand really hands out views: its way of making arrays is not documented."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from running import Serving

from graphkiln_client import Client

pytestmark = [pytest.mark.server, pytest.mark.slow]

CODE = """
from functools import partial
import numpy as np
import triton_python_backend_utils as pb_utils
from graphkiln_backend.triton.model import view_inputs

class TritonPythonModel:
    def initialize(self, args):
        view_inputs(partial(pb_utils.Tensor, "first", np.zeros(1, np.float32)))

    def execute(self, requests):
        responses = []
        for request in requests:
            array = request.inputs()[0].as_numpy()
            owner = array
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
            tensors = [pb_utils.Tensor("copied", np.array([owner.flags.owndata])), pb_utils.Tensor("y", array + 1)]
            responses.append(pb_utils.InferenceResponse(tensors))
        return responses
"""
CONFIG = """
name: "views" backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: -1 }
output { name: "copied" data_type: TYPE_BOOL dims: 1 }
output { name: "y" data_type: TYPE_FP32 dims: -1 }
instance_group { kind: KIND_CPU }
"""


def test_an_input_is_a_view_of_what_was_sent(tmp_path: Path) -> None:
    (tmp_path / "store" / "views" / "1").mkdir(parents=True)
    (tmp_path / "store" / "views" / "1" / "model.py").write_text(CODE)
    (tmp_path / "store" / "views" / "config.pbtxt").write_text(CONFIG)
    with Serving(tmp_path, "--model-store", tmp_path / "store") as server:
        server.wait_ready()
        with Client(server.grpc_url) as client:
            for sent in (np.arange(3, dtype=np.float32), np.arange(200_000, dtype=np.float32)):
                answer = client.model("views").infer({"x": sent})
                assert answer["copied"].tolist() == [False]
                np.testing.assert_array_equal(answer["y"], sent + 1)
