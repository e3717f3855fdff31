"""Load checkpoints into modules without executing code; every tensor must match."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.files import open_regular
from graphkiln_converters.recipe import check_file, first_line

_WRAPPERS = ("state_dict", "model", "model_state_dict", "state_dict_ema", "model_ema")
_PREFIXES = ("module.", "model.", "_orig_mod.")
_SHOWN = 8
# First byte of a file of torch.save: a zip archive, or in old releases a pickle.
_BEGINS = (b"P", b"\x80")
_HINT = "save the state dict alone: torch.save(module.state_dict(), path)"


def load_weights(module: nn.Module, path: Path) -> None:
    """Load a state dict into a module; common wrappers (`state_dict`, ...) and prefixes (`module.`, ...) are removed.

    Raises:
        ConversionError: The file cannot be read, could run code, or its keys or shapes differ from the module's; the
            message lists them.
    """
    expected = module.state_dict()
    state = _unwrap(_read(path), expected)
    _check(state, expected, path)
    expected.update(state)  # keep the module's metadata with the versions of its layers
    module.load_state_dict(expected)


def trained_classes(module: nn.Module, path: Path) -> int | None:
    """Number of classes of a file's weights, if it differs from the module's.

    Args:
        module: A classifier; its last linear layer or convolution has one output per class.
        path: As for `load_weights`.

    Returns:
        None if both are equal, or unknown.

    Raises:
        ConversionError: The file cannot be read.
    """
    state = _unwrap(_read(path), module.state_dict())
    heads = [(name, layer) for name, layer in module.named_modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    name, layer = heads[-1]
    weight = state.get(f"{name}.weight")
    if weight is None or weight.shape[1:] != layer.weight.shape[1:] or len(weight) == len(layer.weight):
        return None
    return len(weight)


def trained_shapes(module: nn.Module, path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a file's tensors by their names in a module.

    Raises:
        ConversionError: The file cannot be read.
    """
    return {name: tuple(tensor.shape) for name, tensor in _unwrap(_read(path), module.state_dict()).items()}


def not_downloaded(name: str, error: OSError) -> ConversionError:
    """Make the error for a failed download of published weights."""
    return ConversionError(
        f"cannot download the weights of {name}: {error}",
        hint="download them elsewhere and name the file: --weights FILE",
    )


def _unwrap(checkpoint: dict[str, Any], expected: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    for wrapper in _WRAPPERS:
        if isinstance(checkpoint.get(wrapper), dict):
            checkpoint = checkpoint[wrapper]
            break
    state = {key: value for key, value in checkpoint.items() if isinstance(value, torch.Tensor)}
    for prefix in _PREFIXES:
        if state and all(key.startswith(prefix) for key in state) and not any(k.startswith(prefix) for k in expected):
            state = {key.removeprefix(prefix): value for key, value in state.items()}
    return state


def _read(path: Path) -> dict[str, Any]:
    check_file(path, what="weights", expected="a .pth, .pt or .safetensors file")
    try:
        with open_regular(path) as file:
            begun = file.read(1)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        if begun not in _BEGINS:
            raise ConversionError(f"{path} holds no weights: torch.save did not write it", hint=_HINT) from error
        raise ConversionError(
            f"{path} holds more than tensors and is not loaded: it could run code ({first_line(error)[:200]})",
            hint=_HINT,
        ) from error
    except Exception as error:
        raise ConversionError(f"cannot read weights from {path}: {first_line(error)[:200]}") from error
    if not isinstance(content, dict):
        raise ConversionError(
            f"{path} holds a {type(content).__name__}, expected a state dict",
            hint="save torch.save(module.state_dict(), path)",
        )
    return content


def _check(state: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], path: Path) -> None:
    differences = {
        "missing": [key for key in expected if key not in state],
        "unknown": [key for key in state if key not in expected],
        "of another shape": [
            f"{key} {list(state[key].shape)} instead of {list(expected[key].shape)}"
            for key in expected
            if key in state and state[key].shape != expected[key].shape
        ],
    }
    if any(differences.values()):
        parts = [f"{len(keys)} {what}: {_listed(keys)}" for what, keys in differences.items() if keys]
        raise ConversionError(
            f"the weights of {path} are of another model: {'; '.join(parts)}",
            hint="name the architecture that they belong to",
        )


def _listed(keys: Iterable[str]) -> str:
    keys = list(keys)
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more
