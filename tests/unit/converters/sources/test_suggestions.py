"""What is suggested to somebody who wrote a source that is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_converters.sources import base as suggestions
from graphkiln_converters.sources.base import suggest

KINDS = ("torchvision", "timm", "huggingface", "python", "oneflow")
LISTED = {
    "torchvision": ["resnet18", "vit_b_16"],
    "timm": ["resnet18", "resnet18d", "vit_base_patch16_224"],
    "huggingface": ["bert", "vit"],
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries with a few architectures each."""
    monkeypatch.setattr(suggestions, "_names", lambda kind, _: LISTED[kind])


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("resnet18", "torchvision:resnet18"),
        ("ResNet18", "torchvision:resnet18"),
        ("resnet18d", "timm:resnet18d"),
        ("vit-base-patch16-224", "timm:vit_base_patch16_224"),
        ("resnet18d.ra2_in1k", "timm:resnet18d.ra2_in1k"),
        ("resnt18", "torchvision:resnet18"),
        ("bert-base-uncased", "huggingface:bert-base-uncased"),
        ("google/flan-t5-small", "huggingface:google/flan-t5-small"),
        ("timm/resnet18.a1_in1k", "timm:resnet18.a1_in1k"),
        ("torchvison:resnet18", "torchvision:resnet18"),
        ("TIMM:resnet18", "timm:resnet18"),
        ("hf:org/name", "huggingface:org/name"),
        ("transformers:bert", "huggingface:bert"),
        ("flowvision:resnet18", "torchvision:resnet18"),
        ("pyton:net.py:make", "python:net.py:make"),
    ],
)
def test_a_name_that_is_near(source: str, meant: str) -> None:
    assert suggest(source, KINDS) == f"did you mean '{meant}'?"


@pytest.mark.parametrize("source", ["", " ", "zzz", "zzz:model", "timm", "timm:", "://", "a:b:c"])
def test_nothing_is_near(source: str) -> None:
    assert suggest(source, KINDS) == ""


def test_folders_and_files_that_are_there(tmp_path: Path) -> None:
    files = ("bert/config.json", "flow/model.mlir", "store/net/1/model.onnx", "net.py", "net.pth", "empty/x.txt")
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    expected = {
        "bert": f"did you mean 'huggingface:{tmp_path}/bert'?",
        "flow": f"did you mean 'oneflow:{tmp_path}/flow'?",
        "store/net": f"did you mean '{tmp_path}/store/net/1/model.onnx'?",
        "net.py": f"python:{tmp_path}/net.py:FUNCTION",
        "net.pth": f"torchvision:ARCH --weights {tmp_path}/net.pth",
    }
    for name, words in expected.items():
        assert words in suggest(str(tmp_path / name), KINDS)


class TestLibraries:
    def test_one_that_is_not_installed_lists_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        monkeypatch.setitem(__import__("sys").modules, "graphkiln_converters.sources.timm", None)
        assert list(suggestions._names("timm", "list_all_architectures")) == []

    @pytest.mark.parametrize(
        ("kind", "function", "name"),
        [
            ("torchvision", "list_architectures", "resnet18"),
            ("timm", "list_all_architectures", "resnet34"),
            ("huggingface", "list_model_types", "bert"),
        ],
    )
    def test_each_lists_its_own(self, monkeypatch: pytest.MonkeyPatch, kind: str, function: str, name: str) -> None:
        monkeypatch.undo()
        assert name in set(suggestions._names(kind, function))


def test_nobody_waits_for_libraries_because_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bert-base").touch()
    monkeypatch.chdir(tmp_path)
    assert suggest("bert-base", KINDS) == ""


def test_a_file_with_nearly_that_name(tmp_path: Path) -> None:
    (tmp_path / "good.onnx").touch()
    assert suggest(str(tmp_path / "good.onx"), KINDS) == f"did you mean '{tmp_path / 'good.onnx'}'?"
