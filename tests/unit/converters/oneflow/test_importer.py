"""What OneFlow saved into a model repository: how it is found, and what becomes of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import saved_graphs
from graphkiln_converters.oneflow.importer import OneFlowImporter

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.repository.version import read_version


@pytest.fixture
def version(tmp_path: Path) -> Path:
    """A version folder as oneflow-serving served it: `cnn/model`."""
    return saved_graphs.unpack("models.zip", tmp_path, "cnn") / "cnn"


class TestFinding:
    def test_the_graph_lies_in_a_folder_called_model(self, version: Path) -> None:
        assert OneFlowImporter().find_saved(version) == version / "model"

    @pytest.mark.parametrize("remove", ["model", "model/model.mlir"])
    def test_or_nowhere(self, version: Path, remove: str) -> None:
        (version / remove).rename(version / "away")
        assert OneFlowImporter().find_saved(version) is None

    def test_a_folder_in_place_of_the_text_is_none(self, tmp_path: Path) -> None:
        (tmp_path / "model" / "model.mlir").mkdir(parents=True)
        assert OneFlowImporter().find_saved(tmp_path) is None

    def test_a_version_that_is_not_there_holds_none(self, tmp_path: Path) -> None:
        assert OneFlowImporter().find_saved(tmp_path / "none") is None


class TestConverting:
    def test_makes_a_proven_version_and_leaves_the_source_alone(self, version: Path, tmp_path: Path) -> None:
        saved, target = version / "model", tmp_path / "target"
        target.mkdir()
        before = {path: path.stat().st_mtime_ns for path in saved.rglob("*")}
        OneFlowImporter().convert(saved, target)
        made = read_version(target)
        assert made.golden is not None
        assert made.manifest is not None
        assert made.manifest.verification[0].verdict.endswith("PASS")
        assert made.manifest.provenance.command == f"graphkiln convert oneflow:{saved} --name NAME"
        assert {path: path.stat().st_mtime_ns for path in saved.rglob("*")} == before

    def test_a_graph_that_is_damaged_leaves_nothing(self, version: Path, tmp_path: Path) -> None:
        (version / "model" / "model.mlir").write_text("module {")
        target = tmp_path / "target"
        target.mkdir()
        with pytest.raises(ConversionError, match=r"model\.mlir"):
            OneFlowImporter().convert(version / "model", target)
        assert list(target.iterdir()) == []


def test_looking_for_it_imports_neither_torch_nor_a_parser() -> None:
    """Every server does, at every start."""
    program = (
        "import sys; from pathlib import Path; from graphkiln_converters.oneflow.importer import OneFlowImporter; "
        "OneFlowImporter().find_saved(Path('.')); print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "onnx", "onnx_ir", "numpy", "lark", "pydantic"} & set(loaded)
