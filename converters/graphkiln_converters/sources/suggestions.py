"""What was probably meant by a source that is none: `resnet18`, `hf:bert`, a folder, a file of weights.

The libraries of the sources are asked for their architectures, as far as they are installed: whoever wrote a wrong name
can wait for that.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from graphkiln_converters.given_files import near_file

_ALIASES = {
    **dict.fromkeys(("tv", "torch", "pytorch", "torchvision.models", "flowvision"), "torchvision"),
    **dict.fromkeys(("hf", "transformers", "hub", "hf-hub", "hf_hub"), "huggingface"),
    **dict.fromkeys(("py", "module"), "python"),
    **dict.fromkeys(("flow", "of"), "oneflow"),
}
"""Other words for the kinds of sources."""
_WEIGHTS = {".pt", ".pth", ".bin", ".ckpt", ".safetensors"}
_IN_FOLDER = {"config.json": "huggingface", "model.mlir": "oneflow"}
"""A file that makes a folder a source."""
_CUTOFF = 0.75
_HUB = re.compile(r"[\w.-]+/[\w.-]+")
_LISTS = {"torchvision": "list_architectures", "timm": "list_all_architectures"}
_MODEL_TYPES = "list_model_types"


def suggest(source: str, kinds: Collection[str]) -> str:
    """A hint for somebody who wrote a source that is none.

    Args:
        source: What was written.
        kinds: The kinds of sources.

    Returns:
        The hint; empty where nothing is near.
    """
    if Path(source).is_file():  # no name of an architecture: nobody need wait for the libraries
        return _of_path(Path(source))
    finders: tuple[Callable[[], str], ...] = (
        lambda: _of_path(Path(source)),
        lambda: near_file(Path(source)) if Path(source).suffix else "",
        lambda: _of_kind(source, kinds),
        lambda: _of_architecture(source),
    )
    return next((hint for find in finders if (hint := find())), "") if source.strip() else ""


def _meant(source: str) -> str:
    return f"did you mean '{source}'?"


def _of_path(path: Path) -> str:
    """For a file or folder that is there."""
    if path.is_dir():
        kinds = [kind for name, kind in _IN_FOLDER.items() if (path / name).exists()]
        graphs = sorted(path.glob("**/*.onnx"))
        return _meant(f"{kinds[0]}:{path}") if kinds else _meant(str(graphs[-1])) if graphs else ""
    if not path.is_file():
        return ""
    if path.suffix == ".py":
        return f"name the function that returns the model: python:{path}:FUNCTION"
    if path.suffix in _WEIGHTS:
        return f"weights alone are no model: name its architecture, for example torchvision:ARCH --weights {path}"
    return ""


def _of_kind(source: str, kinds: Collection[str]) -> str:
    """For KIND:LOCATION, or KIND/LOCATION, with another word for the kind."""
    for separator in ":/":
        kind, found, location = source.partition(separator)
        near = difflib.get_close_matches(kind.lower(), kinds, n=1)
        known = _ALIASES.get(kind.lower()) or (near[0] if near else "")
        if found and known and location:
            return _meant(f"{known}:{location}")
    return ""


def _of_architecture(source: str) -> str:
    """For the name of an architecture, or of a model on the hub."""
    wanted = source.lower()
    names = {name: kind for kind in reversed(_LISTS) for name in _names(kind, _LISTS[kind])}
    for spelled in (wanted, wanted.replace("-", "_")):
        base, tag, _ = spelled.partition(".")
        if base in names:
            return _meant(f"{'timm' if tag else names[base]}:{spelled}")  # only timm has tags
    first, dash, _ = wanted.replace("_", "-").partition("-")
    if _HUB.fullmatch(source) or (dash and first in set(_names("huggingface", _MODEL_TYPES))):
        return _meant(f"huggingface:{source}")
    near = difflib.get_close_matches(wanted.replace("-", "_"), names, n=1, cutoff=_CUTOFF)
    return _meant(f"{names[near[0]]}:{near[0]}") if near else ""


def _names(kind: str, function: str) -> Iterable[str]:
    """The architectures that a source module lists; none where its library is not installed."""
    try:
        module = importlib.import_module(f"graphkiln_converters.sources.{kind}")
    except ImportError:
        return ()
    listed: Iterable[str] = getattr(module, function)()
    return listed
