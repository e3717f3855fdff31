"""Model stores of benchmarks, and synthetic photographs."""

from __future__ import annotations

import io
from pathlib import Path

import inputs
import numpy as np
import pytest
from inputs import DIGITS, add_model, openvino_settings, synthetic_photograph
from PIL import Image

from graphkiln_backend.repository.version import read_version


def test_a_model_is_a_link_and_a_complete_configuration(tmp_path: Path) -> None:
    graph = DIGITS / "1" / "model.onnx"
    add_model(tmp_path, "copy", graph, "\ninstance_group { count: 2 kind: KIND_CPU }\n")
    assert (tmp_path / "copy" / "1" / "model.onnx").resolve() == graph.resolve()
    text = (tmp_path / "copy" / "config.pbtxt").read_text()
    assert 'name: "copy"' in text
    assert "max_batch_size: 8" in text
    assert "dims: [1, 32, 32]" in " ".join(text.split()).replace("dims: 1 dims: 32 dims: 32", "dims: [1, 32, 32]")
    assert text.endswith("instance_group { count: 2 kind: KIND_CPU }\n")
    assert read_version(tmp_path / "copy" / "1").graph_path.is_file()


def test_a_second_model_of_the_same_name_is_refused(tmp_path: Path) -> None:
    add_model(tmp_path, "copy", DIGITS / "1" / "model.onnx")
    with pytest.raises(FileExistsError):
        add_model(tmp_path, "copy", DIGITS / "1" / "model.onnx")


@pytest.mark.parametrize(("missing", "precision"), [("", "bf16"), ("no instructions", "fp32")])
def test_bf16_is_measured_on_processors_with_it(missing: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inputs, "missing_instructions", lambda _: missing)
    assert openvino_settings() == {"engine": "openvino", "precision": precision}


def test_a_photograph_has_the_size_and_detail_of_one() -> None:
    data = synthetic_photograph(500, 375)
    image = Image.open(io.BytesIO(data))
    assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (500, 375))
    assert 20_000 < len(data) < 200_000
    assert np.asarray(image).std() > 30


def test_photographs_are_reproducible_and_differ_by_seed() -> None:
    assert synthetic_photograph(60, 60, 1) == synthetic_photograph(60, 60, 1) != synthetic_photograph(60, 60, 2)
