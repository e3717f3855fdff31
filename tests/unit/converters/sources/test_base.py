"""Opening sources by kind, suggestions for misspelled ones, and synthetic samples."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from recipes import recipe

from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ConversionError, EngineUnavailable
from graphkiln_converters.recipe import Recipe
from graphkiln_converters.sources import base
from graphkiln_converters.sources.base import InputSpec, open_source, sizes_of, suggest, synthetic_samples


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, Recipe]]:
    """Opened sources: module, location, recipe."""
    calls: list[tuple[str, str, Recipe]] = []

    def import_module(name: str) -> Any:
        module = ModuleType(name)

        def open_(location: str, given: Recipe) -> str:
            calls.append((name.rpartition(".")[2], location, given))
            return "the model"

        vars(module)["open_source"] = open_
        return module

    monkeypatch.setattr(base.importlib, "import_module", import_module)
    return calls


class TestKinds:
    @pytest.mark.parametrize(
        ("source", "module", "location"),
        [
            ("torchvision:resnet18", "torchvision", "resnet18"),
            ("huggingface:C:/models", "huggingface", "C:/models"),
            ("oneflow:saved.onnx", "oneflow_graph", "saved.onnx"),
            ("M.ONNX", "onnx_file", "M.ONNX"),
            ("C:/models/m.pt2", "exported_program", "C:/models/m.pt2"),
        ],
    )
    def test_a_source_is_opened_by_the_module_of_its_kind(
        self, opened: list[tuple[str, str, Recipe]], source: str, module: str, location: str
    ) -> None:
        assert str(open_source(recipe(source))) == "the model"
        assert opened == [(module, location, recipe(source))]

    @pytest.mark.parametrize("name", ["M.PT2", "a:b.pt2"])
    def test_a_file_that_can_run_code_is_not_opened(
        self, opened: list[tuple[str, str, Recipe]], tmp_path: Path, name: str
    ) -> None:
        (tmp_path / name).touch()
        with pytest.raises(ConversionError, match=r"can run code .*--allow-code"):
            open_source(recipe(str(tmp_path / name)))
        assert opened == []

    @pytest.mark.parametrize(
        ("source", "hint"),
        [
            ("torchvison:resnet18", "did you mean 'torchvision:resnet18'?"),
            (
                "zzz:model",
                "known: torchvision:..., timm:..., huggingface:..., decoder:..., python:..., oneflow:..., torchscript",
            ),
            ("model.pth", "FILE.onnx"),
            ("", "known: "),
        ],
    )
    def test_an_unknown_source_is_refused_with_the_nearest(self, source: str, hint: str) -> None:
        with pytest.raises(ConversionError, match=f"'{source}' is not a source") as caught:
            open_source(recipe(source))
        assert hint in caught.value.hint

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ("nopedir", "there is no such file or folder, and it names no kind of model"),
            ("./bert", "there is no such file or folder"),
            ("folder", "it is a folder"),
            ("model.bin", r"files named \*\.bin are not known"),
            ("zzz:model", "'zzz' is not a kind of model"),
            (" ", "it is empty"),
        ],
    )
    def test_reason_why_a_source_is_unknown(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, reason: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "folder").mkdir()
        (tmp_path / "model.bin").touch()
        with pytest.raises(ConversionError, match=f"'{source}' is not a source: {reason}") as caught:
            open_source(recipe(source))
        assert "huggingface:./" not in caught.value.hint

    @pytest.mark.parametrize("source", ["oneflow:folder", "m.onnx"])
    def test_weights_for_a_file_with_weights_are_refused(
        self, opened: list[tuple[str, str, Recipe]], source: str
    ) -> None:
        with pytest.raises(ConversionError, match="contains its own weights"):
            open_source(recipe(source, weights=Path("w.pth")))
        assert opened == []

    @pytest.mark.parametrize(("source", "extra"), [("timm:resnet18", "timm"), ("python:m:f", "convert")])
    def test_a_missing_library_names_its_extra(self, source: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
        kind = {"timm": "timm", "python": "python_module"}[source.partition(":")[0]]
        monkeypatch.setitem(sys.modules, f"graphkiln_converters.sources.{kind}", None)
        with pytest.raises(EngineUnavailable, match="need a library that is not installed") as caught:
            open_source(recipe(source))
        assert f"[{extra}]" in str(caught.value)


class TestSamples:
    IMAGE = InputSpec(name="image", shape=(3, 4, 5))
    TOKENS = InputSpec(name="tokens", dtype=DType.INT64, shape=(9,), high=100)
    MASK = InputSpec(name="mask", dtype=DType.INT64, shape=(9,), mask=True)

    def test_samples_have_the_types_shapes_and_ranges_of_the_inputs(self) -> None:
        feeds = synthetic_samples((self.IMAGE, self.TOKENS), 50, {}, seed=0)
        assert (feeds["image"].dtype, feeds["image"].shape) == (np.float32, (50, 3, 4, 5))
        assert (feeds["tokens"].dtype, feeds["tokens"].shape) == (np.int64, (50, 9))
        assert feeds["tokens"].min() >= 0
        assert 80 < feeds["tokens"].max() < 100
        assert abs(float(feeds["image"].mean())) < 0.1
        assert 0.9 < float(feeds["image"].std()) < 1.1

    def test_masks_of_half_of_the_samples_are_padded(self) -> None:
        mask = synthetic_samples((self.MASK,), 4, {}, seed=0)["mask"]
        assert mask.tolist() == [[1] * 9] * 2 + [[1] * 6 + [0] * 3] * 2

    def test_other_frameworks_are_refused_with_their_export_command(self) -> None:
        with pytest.raises(ConversionError, match=r"separate environment.*paddle2onnx.*--reference"):
            open_source(recipe("paddle:folder"))

    def test_text_is_drawn_from_the_vocabulary(self) -> None:
        spec = InputSpec(name="words", dtype=DType.BYTES, shape=(2,), words=("red", "gr\u00fcn"))
        drawn = synthetic_samples((spec,), 20, {}, seed=0)["words"]
        assert drawn.shape == (20, 2)
        assert set(drawn.ravel()) == {"red", "gr\u00fcn"}


# Suggestions for misspelled sources.

KINDS = ("torchvision", "timm", "huggingface", "python", "oneflow")
LISTED = {
    "torchvision": ["resnet18", "vit_b_16"],
    "timm": ["resnet18", "resnet18d", "vit_base_patch16_224"],
    "huggingface": ["bert", "vit"],
}


@pytest.fixture(autouse=True)
def libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries with a few architectures each."""
    monkeypatch.setattr(base, "_architectures", LISTED.__getitem__)


@pytest.mark.parametrize(
    ("source", "meant"),
    [
        ("resnet18", "torchvision:resnet18"),
        ("resnet18d", "timm:resnet18d"),
        ("vit-base-patch16-224", "timm:vit_base_patch16_224"),
        ("resnet18d.ra2_in1k", "timm:resnet18d.ra2_in1k"),
        ("resnt18", "torchvision:resnet18"),
        ("bert-base-uncased", "huggingface:bert-base-uncased"),
        ("google/flan-t5-small", "huggingface:google/flan-t5-small"),
        ("timm/resnet18.a1_in1k", "timm:resnet18.a1_in1k"),
        ("hf:org/name", "huggingface:org/name"),
        ("pyton:net.py:make", "python:net.py:make"),
        ("net.py:make", "python:net.py:make"),
    ],
)
def test_the_nearest_source_is_suggested(source: str, meant: str) -> None:
    assert suggest(source, KINDS) == f"did you mean '{meant}'?"


def test_a_file_that_is_no_source_is_not_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.safetensors").touch()
    (tmp_path / "small.onnx").touch()
    assert suggest("layers:small.safetensors", KINDS) == ""
    assert suggest("layers:small.onnx", KINDS) == "did you mean 'small.onnx'?"


def test_existing_folders_and_files_are_suggested_as_sources(tmp_path: Path) -> None:
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


# Sizes of inputs.


@pytest.mark.parametrize(
    ("dims", "given", "sizes"),
    [
        (("b", 3, "h"), {}, (8, 3, 8)),
        (("b", 3, "h"), {"x": (3, 5)}, (8, 3, 5)),
        ((2, 3, "h"), {"": (3, 5)}, (2, 3, 5)),
        (("t", 3, "h"), {"x": (7, 3, 5)}, (7, 3, 5)),
        (("b", 3), {"y": (5,)}, (8, 3)),
        ((), {}, ()),
    ],
)
def test_sizes_are_given_or_default(
    dims: tuple[object, ...], given: dict[str, tuple[int, ...]], sizes: tuple[int, ...]
) -> None:
    assert sizes_of("x", dims, given) == sizes


def test_sizes_of_another_rank_are_refused() -> None:
    with pytest.raises(ConversionError, match=r"does not fit input 'x' \[b, 3, h\] \(.*: x=3x8\)"):
        sizes_of("x", ("b", 3, "h"), {"": (3,)})


def test_known_rows_are_of_their_sizes_only() -> None:
    spec = InputSpec(name="x", shape=(3,), dynamic={0: (1, 6)}, known=np.ones((2, 3), np.float32))
    assert synthetic_samples((spec,), 4, {}, seed=0)["x"].tolist() == [[1.0] * 3] * 4
    assert synthetic_samples((spec,), 4, {"x": {0: 6}}, seed=0)["x"].shape == (4, 6)
