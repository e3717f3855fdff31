"""A network that is not good enough is not written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graphkiln.training.scene_networks import DigitEmbedding
from graphkiln.training.train_scenes import EXAMPLES, compute, write_example


def test_a_network_that_learned_nothing_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(1)
    network = DigitEmbedding().eval()
    torch.nn.init.zeros_(network.project.weight)
    with pytest.raises(SystemExit, match=r"recall_1 below 0\.95: nothing written"):
        write_example("embedding", network, tmp_path, 1)
    assert list(tmp_path.iterdir()) == []


def test_outputs_have_the_names_of_the_graph() -> None:
    assert list(compute(DigitEmbedding().eval(), torch.zeros(1, 1, 32, 32))) == ["OUTPUT_0"]
    assert set(EXAMPLES) == {"detector", "segmenter", "embedding"}
