"""The model repository that Triton sees: links to the versions that may be served, and placeholders.

Triton (24.10) never forgets that a version failed: its readiness stays "no" although the version's folder is gone or
the model unloaded, until the same version number is loaded well. A placeholder is a model of Triton's own Python
backend that loads in half a second, well or badly, as required. It makes Triton forget, and it says why a model
without any good version is not served.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection, Sequence
from itertools import count
from pathlib import Path

from google.protobuf import json_format, text_format

from graphkiln_backend.graph.text import bounded
from graphkiln_backend.repository.config import ModelConfigProto
from graphkiln_backend.repository.overlay import copy_labels, write_mirror
from graphkiln_backend.repository.version import CONFIG_FILE
from graphkiln_backend.server.repository_control import LoadOverride
from graphkiln_backend.triton.sent_models import NOTES, remove_sent

_CONFIG = """backend: "python"
instance_group {{ kind: KIND_CPU count: 1 }}
input {{ name: "none" data_type: TYPE_FP32 dims: [1] }}
output {{ name: "none" data_type: TYPE_FP32 dims: [1] }}
version_policy {{ all {{}} }}
"""
_REFUSING = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def initialize(self, args):
        {before}
        raise pb_utils.TritonModelException({reason!r})

    def execute(self, requests):
        return []
"""
_EMPTY = """import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        error = pb_utils.TritonError("this version is not served", pb_utils.TritonError.UNAVAILABLE)
        return [pb_utils.InferenceResponse(error=error) for _ in requests]
"""

_IMAGES = """from graphkiln_backend.triton.image_model import TritonPythonModel
"""

# Notes where Triton has put the files of a load request: it keeps them when the load fails.
_NOTE = """

def note_sent(args):
    import os

    model = args["model_repository"]
    try:
        os.symlink(model, os.path.join({folder!r}, os.path.basename(model)))
    except OSError:
        pass
"""


def _refusing(reason: str, before: str = "") -> str:
    return _REFUSING.format(reason=bounded(reason), before=before)


class Mirror:
    """A folder of mirrored models; the user's stores are never written to.

    Attributes:
        path: The repository that Triton sees.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "models"
        self._sent = folder / NOTES
        self._next = folder / "next"  # not below `path`: Triton would list it
        self.path.mkdir(parents=True, exist_ok=True)

    def show(self, model: Path, versions: Collection[int], config: ModelConfigProto | None) -> None:
        """Show some versions of a model, and no others; without a configuration, the user's own.

        Raises:
            OSError: The mirror cannot be written.
        """
        write_mirror(model, self._next, versions, config)
        self._swap_in(model.name)

    def show_images(self, name: str, model: Path, versions: Collection[int], config: ModelConfigProto) -> None:
        """Show a model that takes images for versions of another one.

        Raises:
            OSError: The mirror cannot be written.
        """
        write_mirror(model, self._next, (), config)
        for version in versions:
            folder = self._next / str(version)
            folder.mkdir()
            (folder / "model.py").write_text(_IMAGES)
        copy_labels(model, self._next, config)
        self._swap_in(name)

    def images(self, model: Path, versions: Collection[int], config: ModelConfigProto) -> LoadOverride:
        """The load request for a model that takes images for versions of another one and is shown nowhere.

        Raises:
            OSError: The labels cannot be read.
        """
        labels = {output.label_filename for output in config.output if output.label_filename}
        files = {name: (model / name).read_text(encoding="utf-8") for name in labels}
        files |= {f"{version}/model.py": _IMAGES for version in versions}
        return LoadOverride(config=json_format.MessageToJson(config), files=files)

    def refuse(self, name: str, reasons: dict[int, str]) -> None:
        """Show versions of a model whose loading fails with a reason."""
        self._show_placeholder(name, {version: _refusing(text) for version, text in reasons.items()})

    def forget(self, failed: Collection[int], *, serving: Collection[int]) -> LoadOverride:
        """The load request by which Triton forgets that versions of a model failed; the load itself fails.

        Of versions that are loaded together, none goes live if one fails: those that failed earlier load now and are
        dropped as "unloaded", while those that serve are loaded beside what serves and fail there. Nothing is shown in
        the mirror meanwhile: another load of the model, which waits for this one, would find half of it.
        """
        self._sent.mkdir(exist_ok=True)
        reason = "deliberately: this makes Triton forget that another version failed"
        refusing = _refusing(reason, "note_sent(args)") + _NOTE.format(folder=str(self._sent))
        files = dict.fromkeys(failed, _EMPTY) | dict.fromkeys(serving, refusing)
        config = json_format.MessageToJson(text_format.Parse(_CONFIG.format(), ModelConfigProto()))
        return LoadOverride(config=config, files={f"{version}/model.py": text for version, text in files.items()})

    def remove_forgotten(self) -> None:
        """Remove what Triton keeps of such loads, once they are over."""
        remove_sent(self._sent)

    def remove(self, name: str) -> None:
        """Remove a model."""
        shutil.rmtree(self.path / name, ignore_errors=True)

    def _show_placeholder(self, name: str, files: dict[int, str]) -> None:
        for version, text in files.items():
            folder = self._next / str(version)
            folder.mkdir(parents=True)
            (folder / "model.py").write_text(text, encoding="utf-8")
        (self._next / CONFIG_FILE).write_text(_CONFIG.format())
        self._swap_in(name)

    def _swap_in(self, name: str) -> None:
        self.remove(name)
        self._next.rename(self.path / name)


class StoreView:
    """Links to the user's stores for Triton in explicit mode; they lead elsewhere while some models are mirrored.

    What is loaded keeps its path: an instance never notices.

    Attributes:
        paths: What Triton is given, one for each store.
    """

    def __init__(self, folder: Path, stores: Sequence[Path], mirror: Mirror) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.paths = [folder / str(index) for index in range(len(stores))]
        self._stores = [store.absolute() for store in stores]
        self._mirror = mirror
        self._numbers = count()

    def show_mirrored(self, models: Collection[str]) -> None:
        """Show these models as the mirror has them, and everything else as it is.

        Raises:
            OSError: The links cannot be written.
        """
        for path, store in zip(self.paths, self._stores, strict=True):
            before = path.readlink() if path.is_symlink() else store
            _relink(path, self._mixture(path, store, models) if models else store)
            if before.parent == path.parent:
                shutil.rmtree(before)

    def _mixture(self, path: Path, store: Path, models: Collection[str]) -> Path:
        folder = self._new_folder(path)
        for entry in store.iterdir():
            mirrored = self._mirror.path / entry.name
            shown = mirrored if entry.name in models and mirrored.exists() else entry
            (folder / entry.name).symlink_to(shown)
        return folder

    def _new_folder(self, path: Path) -> Path:
        folder = next(
            each for number in self._numbers if not (each := path.with_name(f"{path.name}.{number}")).exists()
        )
        folder.mkdir()
        return folder


def _relink(link: Path, target: Path) -> None:
    """Make a link lead elsewhere, in one step."""
    new = link.with_name(f"{link.name}.next")
    new.symlink_to(target)
    new.replace(link)
