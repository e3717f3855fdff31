"""Whether a version fits a model's configuration and its other versions."""

from __future__ import annotations

from pathlib import Path

import pytest
import zoo

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.repository.version import read_version_signature
from graphkiln_converters.writer import check_fits, check_newest_fits

CONFIG = """max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [%d] } output { name: "y" data_type: TYPE_FP32 dims: [%d] }"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a graph with three columns."""
    path = tmp_path / "draft.pbtxt"
    path.write_text(CONFIG % (3, 3))
    return path


def test_what_the_configuration_says_holds(config: Path, tmp_path: Path) -> None:
    fits, other = (zoo.add(tmp_path, f"m{width}", zoo.scale(("batch", width))) for width in (3, 4))
    check_fits(config, read_version_signature(fits))
    with pytest.raises(ConversionError, match="does not fit the new version"):
        check_fits(config, read_version_signature(other))


def test_so_does_what_the_newest_version_says(config: Path, tmp_path: Path) -> None:
    zoo.add(tmp_path, "m", zoo.scale(("batch", 4)))
    with pytest.raises(ConversionError, match="version 1 of 'm' has another signature") as caught:
        check_newest_fits(tmp_path / "m", config)
    assert "--name" in caught.value.hint
    zoo.add(tmp_path, "m", zoo.scale(("batch", 3)), version=2)
    check_newest_fits(tmp_path / "m", config)


def test_a_version_that_cannot_be_read_says_nothing(config: Path, tmp_path: Path) -> None:
    check_newest_fits(tmp_path / "m", config)
    (zoo.add(tmp_path, "m", zoo.scale(("batch", 4))) / "model.onnx").write_bytes(b"PK")
    check_newest_fits(tmp_path / "m", config)
