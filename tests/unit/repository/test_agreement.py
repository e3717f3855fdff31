"""Compatible and incompatible changes between the signatures of two versions."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import zoo
from google.protobuf import text_format

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.agreement import check_agreement, find_disagreement
from graphkiln_backend.repository.config import ModelConfigProto

OLD = """
max_batch_size: 8
input { name: "x" data_type: TYPE_FP32 dims: [3, -1] }
input { name: "o" data_type: TYPE_FP32 dims: [1] optional: true }
output { name: "y" data_type: TYPE_FP32 dims: [5] }
"""


def parse(text: str) -> ModelConfigProto:
    return text_format.Parse(text, ModelConfigProto())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("max_batch_size: 8", ""), "it does not support batches"),
        (('"x"', '"z"'), "input 'x' is missing; input 'z' is new"),
        (('"y"', '"z"'), "output 'y' is missing"),
        (("TYPE_FP32 dims: [5]", "TYPE_FP16 dims: [5]"), "output 'y' is FP16 [5], not FP32 [5]"),
        (("dims: [5]", "dims: [7]"), "output 'y' is FP32 [7], not FP32 [5]"),
        (("[3, -1]", "[3, 4]"), "input 'x' is FP32 [3, 4], not FP32 [3, -1]"),
        (("[3, -1]", "[3]"), "input 'x' is FP32 [3], not FP32 [3, -1]"),
        (("optional: true", ""), "input 'o' is no longer optional"),
        (("[3, -1] }", '[3, -1] } input { name: "w" data_type: TYPE_FP32 dims: [1] }'), "input 'w' is new"),
    ],
)
def test_breaking_changes(change: tuple[str, str], words: str) -> None:
    assert find_disagreement(parse(OLD.replace(*change)), parse(OLD)) == words


@pytest.mark.parametrize(
    "change",
    [
        ("max_batch_size: 8", "max_batch_size: 4"),
        ("dims: [5]", "dims: [-1]"),
        ("[3, -1]", "[-1, -1]"),
        ("dims: [5] }", 'dims: [5] } output { name: "z" data_type: TYPE_FP32 dims: [5] }'),
        ("[3, -1] }", '[3, -1] } input { name: "w" data_type: TYPE_FP32 dims: [1] optional: true }'),
    ],
)
def test_compatible_changes(change: tuple[str, str]) -> None:
    assert find_disagreement(parse(OLD.replace(*change)), parse(OLD)) == ""
    assert find_disagreement(parse(OLD), parse(OLD)) == ""


class TestOtherVersions:
    """Versions with different numbers of columns, under a configuration without dims."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        for version, columns in ((1, 3), (2, 3), (3, 4)):
            zoo.add(tmp_path, "m", zoo.scale(("batch", columns)), version=version)
        return tmp_path / "m"

    def check(self, model: Path, version: int, *serving: int, policy: str = "all {}") -> None:
        check_agreement(parse(f"version_policy {{ {policy} }}"), model / str(version), serving, lambda folder: folder)

    def test_version_that_contradicts_a_served_one_is_refused(self, model: Path) -> None:
        words = r"version 1 \(served now\) differs: output 'y' is FP32 \[4\], not FP32 \[3\].*--name"
        with pytest.raises(RepositoryError, match=words):
            self.check(model, 3, 1)

    def test_newest_of_several_new_versions_decides(self, model: Path) -> None:
        self.check(model, 3)
        for older in (1, 2):
            words = r"version 3 .newer. .* is FP32 \[3\], not FP32 \[4\]"
            with pytest.raises(RepositoryError, match=words):
                self.check(model, older)

    def test_unselected_versions_are_ignored(self, model: Path) -> None:
        self.check(model, 3, 1, policy="latest {}")
        self.check(model, 2, 1, policy="specific { versions: [1, 2] }")
        shutil.rmtree(model / "1")
        self.check(model, 3, 1)

    def test_written_dims_apply_to_all_versions(self, model: Path) -> None:
        text = (
            'input { name: "x" dims: [3] } output { name: "y" dims: [3] } max_batch_size: 8 version_policy { all {} }'
        )
        check_agreement(parse(text), model / "2", (1, 3), lambda folder: folder)

    def test_unreadable_versions_are_ignored(self, model: Path) -> None:
        (model / "3" / "model.onnx").write_bytes(b"no graph")
        self.check(model, 1, 3)
