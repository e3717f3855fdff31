"""Checkpoints: wrapped, prefixed, truncated, of another model, or with code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from odd_files import ODD
from safetensors.torch import save_file
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_converters.weights import load_weights, trained_classes


def classifier(classes: int = 5, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, classes))


@pytest.fixture
def trained() -> dict[str, torch.Tensor]:
    return classifier(seed=1).state_dict()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "weights.pth"


def same(module: nn.Module, state: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, state[key]) for key, value in module.state_dict().items())


class TestWrappers:
    def loaded(self, content: Any, path: Path) -> nn.Module:
        torch.save(content, path)
        module = classifier()
        load_weights(module, path)
        return module

    @pytest.mark.parametrize("key", ["state_dict", "model_ema"])
    def test_wrapped_checkpoints_are_loaded(self, trained: dict[str, torch.Tensor], path: Path, key: str) -> None:
        checkpoint = {"epoch": 3, "optimizer": {"lr": 0.1}, key: trained}
        assert same(self.loaded(checkpoint, path), trained)

    @pytest.mark.parametrize("prefix", ["model.", "module._orig_mod."])
    def test_prefixes_are_removed(self, trained: dict[str, torch.Tensor], path: Path, prefix: str) -> None:
        """Prefixes of Lightning, and of torch.compile inside DataParallel."""
        assert same(self.loaded({f"{prefix}{key}": value for key, value in trained.items()}, path), trained)

    def test_a_prefix_of_the_module_stays(self, path: Path) -> None:
        class Wrapper(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.model = nn.Linear(2, 2)

        state = Wrapper().state_dict()
        torch.save(state, path)
        module = Wrapper()
        load_weights(module, path)
        assert same(module, state)

    def test_safetensors(self, trained: dict[str, torch.Tensor], tmp_path: Path) -> None:
        save_file(trained, tmp_path / "w.safetensors")
        module = classifier()
        load_weights(module, tmp_path / "w.safetensors")
        assert same(module, trained)


class Versioned(nn.Linear):
    """A layer that loads by the version of its weights, like torchvision's MNASNet."""

    _version = 2

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: Any, *rest: Any) -> None:
        assert local_metadata.get("version") == 2
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.parametrize("prefix", ["", "module."])
def test_layers_get_the_version_of_their_weights(path: Path, prefix: str) -> None:
    torch.save({f"{prefix}{key}": value for key, value in Versioned(2, 2).state_dict().items()}, path)
    load_weights(Versioned(2, 2), path)


class TestOtherModels:
    def message(self, state: dict[str, torch.Tensor], path: Path) -> str:
        torch.save(state, path)
        module = classifier()
        before = {key: value.clone() for key, value in module.state_dict().items()}
        with pytest.raises(ConversionError, match="are of another model") as caught:
            load_weights(module, path)
        assert same(module, before), "nothing is loaded in part"
        return caught.value.message

    def test_missing_and_unknown_keys_are_listed(self, trained: dict[str, torch.Tensor], path: Path) -> None:
        trained["head.bias"] = trained.pop("3.bias")
        assert "1 missing: 3.bias; 1 unknown: head.bias" in self.message(trained, path)

    def test_other_shapes_are_listed(self, trained: dict[str, torch.Tensor], path: Path) -> None:
        trained["3.weight"] = torch.zeros(5, 8)
        assert "1 of another shape: 3.weight [5, 8] instead of [5, 16]" in self.message(trained, path)


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("raise SystemExit('code ran')",))


class TestFiles:
    def test_a_missing_file_is_refused(self, path: Path) -> None:
        with pytest.raises(ConversionError, match="weights: there is no file") as caught:
            load_weights(classifier(), path)
        assert ".safetensors" in caught.value.hint

    @pytest.mark.parametrize("wrapped", [True, False])
    def test_code_is_not_run(self, path: Path, wrapped: bool) -> None:
        torch.save({"state_dict": Harmful()} if wrapped else Harmful(), path)
        with pytest.raises(ConversionError, match="it could run code") as caught:
            load_weights(classifier(), path)
        assert "torch.save(module.state_dict(), path)" in caught.value.hint

    @pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
    @pytest.mark.parametrize("kept", [0, 200])
    def test_a_truncated_file_is_refused(
        self, trained: dict[str, torch.Tensor], tmp_path: Path, suffix: str, kept: int
    ) -> None:
        path = tmp_path / f"w{suffix}"
        if suffix == ".pth":
            torch.save(trained, path)
        else:
            save_file(trained, path)
        path.write_bytes(path.read_bytes()[:kept])
        with pytest.raises(ConversionError, match=rf"w\{suffix}"):
            load_weights(classifier(), path)


class TestClasses:
    @pytest.mark.parametrize(("classes", "found"), [(5, None), (2, 2), (1000, 1000)])
    def test_classes_are_those_of_the_last_layer(self, path: Path, classes: int, found: int | None) -> None:
        torch.save({"state_dict": classifier(classes).state_dict()}, path)
        assert trained_classes(classifier(), path) == found


@pytest.mark.parametrize("kind", ["pipe", "device", "socket"])
@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_special_files_are_refused(tmp_path: Path, kind: str, ending: str) -> None:
    make, reason = ODD[kind]
    make(tmp_path / f"w.{ending}")
    with pytest.raises(ConversionError, match=rf"cannot read weights from .*w\.{ending}: {reason}"):
        load_weights(classifier(), tmp_path / f"w.{ending}")


def test_a_file_of_another_format_is_refused(path: Path) -> None:
    path.write_bytes(b"\x08\x09 a graph")
    with pytest.raises(ConversionError, match=r"holds no weights: torch\.save did not write it"):
        load_weights(classifier(), path)
