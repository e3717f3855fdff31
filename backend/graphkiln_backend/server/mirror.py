"""The model repository that Triton sees, except in explicit mode: links to the versions to serve, and placeholders.

Triton (24.10) reports a failed version as not ready until the same version number loads successfully, even if its
folder is deleted or the model unloaded. A placeholder is a model of Triton's Python backend that loads in half a
second, and succeeds or fails as required. It clears such failures, and reports why a model without a good version is
not served.
"""

from __future__ import annotations

import shutil
from collections.abc import Collection
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

# Records where Triton stores the files of a load request, because it keeps them if the load fails.
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
    """A folder of mirrored models; the user's stores are never modified.

    Attributes:
        path: The repository that Triton sees.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / "models"
        self._sent = folder / NOTES
        self._next = folder / "next"  # not below `path`: Triton would list it
        self.path.mkdir(parents=True, exist_ok=True)

    def show(self, model: Path, versions: Collection[int], config: ModelConfigProto | None) -> None:
        """Show exactly these versions of a model, with the given configuration or the user's.

        Raises:
            OSError: The mirror cannot be written.
        """
        write_mirror(model, self._next, versions, config)
        self._swap_in(model.name)

    def show_candidate(self, name: str, model: Path, version: int, config: ModelConfigProto) -> None:
        """Show a version of a model as a separate model.

        Raises:
            OSError: The mirror cannot be written.
        """
        write_mirror(model, self._next, (version,), config)
        self._swap_in(name)

    def show_images(self, name: str, model: Path, versions: Collection[int], config: ModelConfigProto) -> None:
        """Show the model that takes images for versions of another model.

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

    def refuse(self, name: str, reasons: dict[int, str]) -> None:
        """Show versions of a model whose load fails with the given reasons."""
        self._show_placeholder(name, {version: _refusing(text) for version, text in reasons.items()})

    def forget(self, failed: Collection[int], *, serving: Collection[int]) -> LoadOverride:
        """Make a load request that clears the failures of some versions; the load itself fails.

        If one of several versions fails to load, none goes live: the failed versions load now and are dropped as
        "unloaded", while the placeholders of the serving versions fail beside them. The mirror is not changed, because
        another load of the model may be waiting.
        """
        self._sent.mkdir(exist_ok=True)
        reason = "deliberately: this clears the failure of another version"
        # In both kinds: `run_folder.remove_sent_models` finds the code of killed servers by this path.
        note = _NOTE.format(folder=str(self._sent))
        refusing = _refusing(reason, "note_sent(args)") + note
        files = dict.fromkeys(failed, _EMPTY + note) | dict.fromkeys(serving, refusing)
        config = json_format.MessageToJson(text_format.Parse(_CONFIG.format(), ModelConfigProto()))
        return LoadOverride(config=config, files={f"{version}/model.py": text for version, text in files.items()})

    def remove_forgotten(self) -> None:
        """Remove the files that Triton keeps of such loads."""
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
