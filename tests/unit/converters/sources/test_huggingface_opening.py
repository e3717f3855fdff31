"""What transformers says of models that it cannot open, in words that help; whose weights a model gets."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.sources.huggingface_opening import create, is_without_weights, opened


class TestOpened:
    @pytest.mark.parametrize(
        ("said", "message", "hint"),
        [
            (OSError("no file\nand more"), "transformers cannot open 'x': no file", "name a folder with config.json"),
            (ValueError("set trust_remote_code=True"), "'x' brings code of its own, which is not run", "python:FILE"),
            (KeyError(), "transformers cannot open 'x': KeyError", "name a folder with config.json"),
            (
                ImportError("\nTimmBackbone requires the timm library. You can install it with pip:\n`pip ...`"),
                "transformers cannot open 'x': TimmBackbone requires the timm library.",
                "graphkiln[timm]",
            ),
            (ImportError("needs natten"), "transformers cannot open 'x': needs natten", "install the library"),
        ],
    )
    def test_translates_what_transformers_says(self, said: Exception, message: str, hint: str) -> None:
        with pytest.raises(ConversionError) as caught, opened("x"):
            raise said
        assert caught.value.message == message
        assert hint in caught.value.hint

    def test_our_own_errors_stay(self) -> None:
        error = ConversionError("ours")
        with pytest.raises(ConversionError) as caught, opened("x"):
            raise error
        assert caught.value is error


@pytest.mark.parametrize(
    ("files", "without"),
    [(("config.json",), True), (("config.json", "model.safetensors"), False), (("pytorch_model.bin",), False)],
)
def test_a_folder_without_weights(tmp_path: Path, files: tuple[str, ...], without: bool) -> None:
    for name in files:
        (tmp_path / name).touch()
    assert is_without_weights(str(tmp_path)) == without
    assert not is_without_weights(str(tmp_path / "an-id-of-the-hub"))


class Factory:
    """Makes nothing, and keeps how it was asked."""

    @classmethod
    def from_pretrained(cls, location: str, **options: Any) -> Any:
        return ("its weights", location, options), {"missing_keys": {"b", "a"}}


class Class(Factory):
    @classmethod
    def _from_config(cls, config: Any) -> Any:
        return ("random", config)


class Automatic(Factory):
    @classmethod
    def from_config(cls, config: Any) -> Any:
        return ("random", config)


@pytest.mark.parametrize("factory", [Class, Automatic])
def test_weights_are_its_own_or_random(tmp_path: Path, factory: type[Factory]) -> None:
    config = SimpleNamespace()
    assert create(str(tmp_path), config, factory) == ("random", config)
    assert config._attn_implementation == "eager"
    (tmp_path / "model.safetensors").touch()
    found, location, options = create(str(tmp_path), config, factory)
    assert (found, location) == ("its weights", str(tmp_path))
    assert (options["trust_remote_code"], options["weights_only"]) == (False, True)


def test_weights_that_are_not_there_are_an_error_where_all_are_needed(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(ConversionError, match=r"lacks 2 of the model's weights, such as a") as caught:
        create(str(tmp_path), SimpleNamespace(), Automatic, complete=True)
    assert "they would be random" in caught.value.hint
