"""The files that a recipe names, looked at before a conversion begins: it may take minutes to come to them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.graph.errors import ConversionError
from graphkiln_backend.graph.text import nearest
from graphkiln_backend.repository.remote_address import is_remote

if TYPE_CHECKING:
    from graphkiln_converters.recipe import Recipe

_ARRAYS_OR_IMAGES = "an .npz of arrays by name, or a folder of images"
_EXPECTED = {
    "weights": "a .pth, .pt or .safetensors file",
    "labels": "a text file, one class a line",
    "calibration": _ARRAYS_OR_IMAGES,
    "samples": _ARRAYS_OR_IMAGES,
    "reference": "an .npz of INPUT_<i> and OUTPUT_<i>",
}
_MAY_BE_FOLDERS = {"calibration", "samples"}


def check_given_files(recipe: Recipe) -> None:
    """Checks that what a recipe names is there, and that its model store can be written.

    Raises:
        ConversionError: It is not.
    """
    for option, expected in _EXPECTED.items():
        path: Path | None = getattr(recipe, option)
        if path is not None and not (option in _MAY_BE_FOLDERS and path.is_dir()):
            check_file(path, what=option, expected=expected)
    _check_store(recipe.model_store)


def check_file(path: Path | str, *, what: str = "", expected: str = "") -> None:
    """Checks that a path leads to a file; what kind of file, its reader says.

    Args:
        path: The path.
        what: What it is to hold, for the message: `weights`.
        expected: What it should be, for the hint.

    Raises:
        ConversionError: There is nothing, or a folder.
    """
    path = Path(path)
    prefix, fallback = f"{what}: " if what else "", f"expected {expected}" if expected else ""
    if path.is_dir():
        inside = sorted(each.name for each in path.glob(f"*{path.suffix}") if each.is_file()) if path.suffix else []
        hint = f"did you mean '{path / inside[0]}'?" if len(inside) == 1 else fallback or "name a file in it"
        raise ConversionError(f"{prefix}{path} is a folder, not a file", hint=hint)
    if not path.exists():
        raise ConversionError(f"{prefix}there is no file {path}", hint=near_file(path) or fallback)


def near_file(path: Path) -> str:
    """A hint that names the file that was probably meant; empty where there is none like it."""
    there = [each.name for each in path.parent.iterdir() if each.is_file()] if path.parent.is_dir() else []
    near = nearest(path.name, there)
    return f"did you mean '{path.parent / near}'?" if near else ""


def _check_store(store: Path) -> None:
    if is_remote(str(store)) or ":/" in str(store):  # a path has lost one of the slashes
        raise ConversionError(
            f"--model-store {store}: versions are written into folders",
            hint="name a folder, then copy the version: aws s3 cp --recursive, gcloud storage cp -r, ...",
        )
    try:
        there = next((each for each in (store, *store.absolute().parents) if each.exists()), store)
    except PermissionError as error:
        raise ConversionError(f"--model-store {store} may not be looked at", hint="choose another folder") from error
    if not there.is_dir():
        raise ConversionError(f"--model-store {store}: {there} is not a folder", hint="name a folder of models")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConversionError(f"--model-store {store}: {there} may not be written", hint="choose another folder")
