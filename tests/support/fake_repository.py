"""Triton's repository control over a mirror, without Triton: what was tried of version 24.10, and nothing else.

A graph whose file says `bad` cannot be loaded. A version that failed stays failed until it is loaded well.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from google.protobuf import json_format

from graphkiln_backend.repository.config import ModelConfigProto, read_config, select_versions, write_config
from graphkiln_backend.server.repository_control import LoadOverride, VersionState


class FakeTriton:
    """Load models of a mirror.

    Attributes:
        loads: The models that were loaded, in order.
        graphs: What serves of each version: its graph, or the code of a placeholder.
        readiness: What the readiness said after each call.
    """

    def __init__(self, *repositories: Path) -> None:
        self._repositories = repositories
        self._states: dict[tuple[str, int], tuple[str, str]] = {}
        self.headers = {"key": "secret"}
        self.loads: list[str] = []
        self.graphs: dict[tuple[str, int], str] = {}
        self.readiness: list[bool] = []

    def start(self) -> None:
        for model in self._models():
            self._load(model)

    def _models(self) -> list[str]:
        return sorted({path.name for repository in self._repositories for path in repository.iterdir()})

    def _folder(self, model: str) -> Path:
        folders = [repository / model for repository in self._repositories]
        return next((folder for folder in folders if folder.is_dir()), folders[0])

    def index(self) -> list[VersionState]:
        names = {*self._models()} | {name for name, _ in self._states}
        rows = [
            VersionState(model=name, version=str(version), state=state, reason=reason)
            for (name, version), (state, reason) in sorted(self._states.items())
        ]
        known = {row.model for row in rows}
        return [*rows, *(VersionState(model=name, version="", state="UNLOADED", reason="") for name in names - known)]

    def load(self, model: str, timeout_s: float, override: LoadOverride | None = None) -> str:
        assert timeout_s > 0
        self.loads.append(model)
        with TemporaryDirectory() as folder:
            error = self._load(model, _write(override, self._folder(model), Path(folder)) if override else None)
        self.readiness.append(self.ready)
        return error

    def unload(self, model: str) -> None:
        for (name, version), (state, _) in list(self._states.items()):
            if name == model and state == "READY":
                self._states[name, version] = ("UNAVAILABLE", "unloaded")
                self.graphs.pop((name, version))
        self.readiness.append(self.ready)

    @property
    def ready(self) -> bool:
        return all(state == "READY" or reason == "unloaded" for state, reason in self._states.values())

    def serving(self, model: str) -> list[int]:
        return [version for (name, version), (state, _) in self._states.items() if name == model and state == "READY"]

    def _load(self, model: str, overriding: Path | None = None) -> str:
        folder = overriding or self._folder(model)
        if not folder.is_dir():
            return "failed to poll from model repository"
        versions = [int(path.name) for path in folder.iterdir() if path.name.isdecimal()]
        wanted = select_versions(read_config(folder / "config.pbtxt"), versions)
        errors = {version: error for version in wanted if (error := _error(folder / str(version)))}
        for version in wanted:
            before = self._states.get((model, version), ("", ""))[0]
            if version in errors and before != "READY":
                self._states[model, version] = ("UNAVAILABLE", errors[version])
            elif version not in errors and errors and before != "READY":
                self._states[model, version] = ("UNAVAILABLE", "unloaded")
        if errors or not wanted:
            return f"load failed for model '{model}': {errors}"
        self.unload(model)
        self._states |= {(model, version): ("READY", "") for version in wanted}
        self.graphs |= {(model, version): _read(folder / str(version)) for version in wanted}
        return ""


class StoreOfFakes:
    """Model store for `FakeTriton`: graphs are words."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()

    def add(self, model: str, version: int, graph: str = "good", config: str | None = None) -> Path:
        """Add a version, and `config` if given."""
        folder = self.folder / model / str(version)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.onnx").write_text(graph)
        if config is not None:
            (self.folder / model / "config.pbtxt").write_text(config)
        return folder


def _write(override: LoadOverride, model: Path, folder: Path) -> Path:
    if not override.files:
        shutil.copytree(model, folder, dirs_exist_ok=True)
    for path, text in override.files.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    write_config(json_format.Parse(override.config, ModelConfigProto()), folder / "config.pbtxt")
    return folder


def _read(version: Path) -> str:
    code = version / "model.py"
    return (code if code.exists() else version / "model.onnx").read_text(errors="replace")


def _error(version: Path) -> str:
    placeholder = version / "model.py"
    if placeholder.exists():
        return "Internal: TritonModelException: placeholder\n\nAt:\n  x" if "raise" in placeholder.read_text() else ""
    graph = version / "model.onnx"
    if not graph.exists() or b"bad" in graph.read_bytes():
        return f"Internal: TritonModelException: {version.parent.name}: cannot serve {graph}\n\nAt:\n  model.py(3): x\n"
    return ""
