"""The repository that Triton sees: what is shown, and placeholders."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from graphkiln_backend.repository.config import read_config
from graphkiln_backend.server.mirror import Mirror


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    return Mirror(tmp_path / "overlay")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for version in (1, 2):
        (tmp_path / "store" / "m" / str(version)).mkdir(parents=True)
    (tmp_path / "store" / "m" / "config.pbtxt").write_text("max_batch_size: 7")
    return tmp_path / "store" / "m"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_shows_some_versions_and_then_others(mirror: Mirror, model: Path) -> None:
    mirror.show(model, [1], None)
    assert names(mirror.path / "m") == ["1", "config.pbtxt"]
    mirror.show(model, [2], read_config(model / "config.pbtxt"))
    assert names(mirror.path / "m") == ["2", "config.pbtxt"]
    assert names(mirror.path) == ["m"]


def test_a_model_that_takes_images_has_label_files_of_its_own(mirror: Mirror, model: Path) -> None:
    """Triton since 26.02 refuses a label file whose real path leaves the model's folder."""
    (model / "1" / "labels.txt").write_text("cat\ndog\n")
    config = read_config(model / "config.pbtxt")
    config.output.add(name="y", label_filename="1/labels.txt")
    mirror.show_images("m.images", model, [1], config)
    labels = mirror.path / "m.images" / "1" / "labels.txt"
    assert labels.resolve().is_relative_to(mirror.path.resolve())
    assert labels.read_text() == "cat\ndog\n"


def test_nothing_else_lies_where_triton_looks(mirror: Mirror, model: Path) -> None:
    mirror.show(model, [1], None)
    mirror.remove("m")
    mirror.remove("m")
    assert names(mirror.path) == []
    assert names(model) == ["1", "2", "config.pbtxt"]


class TritonModelException(Exception):
    pass


@pytest.fixture
def pb_utils(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("triton_python_backend_utils")
    module.TritonModelException = TritonModelException  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", module)
    return module


@pytest.mark.usefixtures("pb_utils")
def test_a_refused_version_fails_with_its_reason(mirror: Mirror) -> None:
    mirror.refuse("m", {3: 'no "graph"\nin it'})
    placeholder = runpy.run_path(str(mirror.path / "m" / "3" / "model.py"))["TritonPythonModel"]
    with pytest.raises(TritonModelException, match='no "graph"\nin it'):
        placeholder().initialize({})
    mirror.refuse("m", {3: "ä" * 100_000})
    placeholder = runpy.run_path(str(mirror.path / "m" / "3" / "model.py"))["TritonPythonModel"]
    with pytest.raises(TritonModelException, match="200000 bytes in all") as raised:
        placeholder().initialize({})
    assert len(str(raised.value).encode()) <= 2048  # Triton sends it on over gRPC
    config = read_config(mirror.path / "m" / "config.pbtxt")
    assert config.backend == "python"
    assert config.version_policy.HasField("all")


@pytest.mark.usefixtures("pb_utils")
def test_to_forget_the_failed_load_and_the_serving_fail(mirror: Mirror, model: Path, tmp_path: Path) -> None:
    mirror.show(model, [1], None)
    override = mirror.forget([2, 3], serving=[1])
    assert names(mirror.path / "m") == ["1", "config.pbtxt"], "others see nothing of it"
    assert json.loads(override.config)["backend"] == "python"
    assert sorted(override.files) == ["1/model.py", "2/model.py", "3/model.py"]
    for path, text in override.files.items():
        (tmp_path / "placeholder.py").write_text(text)
        placeholder = runpy.run_path(str(tmp_path / "placeholder.py"))["TritonPythonModel"]
        assert hasattr(placeholder, "initialize") == (path == "1/model.py")


@pytest.mark.usefixtures("pb_utils")
def test_what_triton_keeps_of_it_is_removed_and_nothing_else(mirror: Mirror, tmp_path: Path) -> None:
    tritons = Path(f"/tmp/folder{os.getpid() % 1_000_000:06d}")
    tritons.mkdir()
    (tmp_path / "placeholder.py").write_text(mirror.forget([2], serving=[1]).files["1/model.py"])
    placeholder = runpy.run_path(str(tmp_path / "placeholder.py"))["TritonPythonModel"]()
    for folder in (tritons, tmp_path, tritons):
        with pytest.raises(TritonModelException, match="deliberately"):
            placeholder.initialize({"model_repository": str(folder)})
    mirror.remove_forgotten()
    mirror.remove_forgotten()
    assert not tritons.exists()
    assert tmp_path.exists()
