"""Stores of OpenVINO Model Server: a `config.json` that lists models, whose folders may be anywhere.

    {"model_config_list": [{"config": {"name": "resnet", "base_path": "models/resnet", "plugin_config": {}}}]}

Folders of models are like those of Triton, `BASE_PATH/1/NAME.xml` with `NAME.bin`, so the store becomes one of links to
them. Keys that cannot be met and would change answers are errors; other keys without effect are named.

Source: OpenVINO Model Server, "Serving Multiple Models" and "Model Server Parameters" (2025).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.graph.files import TEXT_LIMIT, read_bytes
from graphkiln_backend.graph.text import did_you_mean, fault_in_served_name
from graphkiln_backend.repository.config import ModelConfigProto, read_config, write_config
from graphkiln_backend.repository.version import CONFIG_FILE

CONFIG_JSON = "config.json"

_LIST = "model_config_list"
_POLICY = "model_version_policy"
# Keys of the whole file, and of a model, that have no effect.
_UNUSED_LISTS = {
    "mediapipe_config_list": "graphs of MediaPipe are not served",
    "pipeline_config_list": "pipelines are not served; an ensemble of Triton does the same",
    "custom_node_library_config_list": "pipelines are not served",
    "custom_loader_config_list": "loaders of models are not supported",
    "monitoring": "metrics are always on, at Triton's own port",
}
_NO_STATES = "models with states are not served"
_UNUSED = {
    "nireq": "instance_group in config.pbtxt sets the number of parallel requests",
    "allow_cache": "compiled graphs are kept in the artifact cache",
    "idle_sequence_cleanup": _NO_STATES,
    "max_sequence_number": _NO_STATES,
    "low_latency_transformation": _NO_STATES,
}
# Keys that change a graph or its requests, and their values that do not.
_SAVED_SHAPES = "a graph is served with the shapes that it was saved with"
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "batch_size": ((0, "0", "auto"), f"{_SAVED_SHAPES}: max_batch_size in config.pbtxt limits batches"),
    "shape": (("auto",), _SAVED_SHAPES),
    "layout": ((), "tensors are served in the layout that the graph was saved with"),
    "mean": ((), "tensors are passed on as they are"),
    "scale": ((), "tensors are passed on as they are"),
    "color_format": ((), "tensors are passed on as they are"),
    "precision": ((), "tensors are passed on as they are"),
    "stateful": ((False,), _NO_STATES),
    "custom_loader_options": (({},), "loaders of models are not supported"),
}
_KNOWN = ("name", "base_path", _POLICY, "plugin_config", "target_device", *_UNUSED, *_REFUSED)


@dataclass(frozen=True, kw_only=True, slots=True)
class OvmsModel:
    """An entry of `model_config_list`.

    Attributes:
        name: Name of the model.
        folder: Folder of its versions.
        properties: OpenVINO's properties in `plugin_config`, and its TARGET_DEVICE.
        policy: A configuration with the version policy; None for the newest version, the default of both servers.
        notes: Keys without effect, with the reason.
    """

    name: str
    folder: Path
    properties: Mapping[str, str]
    policy: ModelConfigProto | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class OvmsStore:
    """A `config.json`.

    Attributes:
        path: The file.
        models: Its models.
        notes: Keys of the file without effect, with the reason.
    """

    path: Path
    models: tuple[OvmsModel, ...]
    notes: tuple[str, ...] = ()

    def link(self, store: Path) -> None:
        """Fill a folder with a link to each model; a model with a version policy becomes a folder of links.

        Raises:
            RepositoryError: Its config.pbtxt cannot be read.
            OSError: The folder cannot be written.
        """
        for model in self.models:
            place = store / model.name
            if model.policy is None or not model.folder.is_dir():
                place.symlink_to(model.folder)
                continue
            config = read_config(model.folder / CONFIG_FILE)
            config.version_policy.CopyFrom(model.policy.version_policy)
            place.mkdir()
            for entry in model.folder.iterdir():
                if entry.name != CONFIG_FILE:
                    (place / entry.name).symlink_to(entry)
            write_config(config, place / CONFIG_FILE)


def read_ovms(path: Path) -> OvmsStore | None:
    """Read the `config.json` of a store; None for a path without one, or with one of another program.

    Args:
        path: The store, or the file.

    Raises:
        RepositoryError: A key is unknown, malformed or cannot be met.
    """
    path = (path / CONFIG_JSON if path.is_dir() else path).absolute()
    if path.suffix != ".json" or not path.is_file():
        return None
    try:
        content = read_bytes(path, TEXT_LIMIT)
        if _LIST.encode() not in content:
            return None
        document = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise RepositoryError(f"{path} cannot be read: {error}", hint="it must be JSON") from error
    if not isinstance(document, dict) or not isinstance(document.get(_LIST), list):
        raise RepositoryError(f"{path} has no list {_LIST}")
    _check_keys(document, (_LIST, *_UNUSED_LISTS), str(path))
    models = tuple(_read_model(entry, path, number) for number, entry in enumerate(document[_LIST]))
    names = [model.name for model in models]
    if twice := next((name for name in names if names.count(name) > 1), ""):
        raise RepositoryError(f"{path} lists two models named '{twice}'")
    notes = tuple(f"{path}: {key}: {reason}" for key, reason in _UNUSED_LISTS.items() if document.get(key))
    return OvmsStore(path=path, models=models, notes=notes)


def _check_keys(entry: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for key in entry:
        if key not in known:
            raise RepositoryError(f"{where}: unknown key '{key}'", hint=did_you_mean(key, known))


def _read_model(entry: Any, path: Path, number: int) -> OvmsModel:
    config = entry.get("config") if isinstance(entry, dict) else None
    if not isinstance(config, dict):
        raise RepositoryError(f"{path}: {_LIST}[{number}] must be an object with a `config`")
    name, base = config.get("name"), config.get("base_path")
    if not (isinstance(name, str) and isinstance(base, str) and name and base):
        raise RepositoryError(f"{path}: {_LIST}[{number}] needs a `name` and a `base_path`")
    where = f"{path}: model '{name}'"
    if fault := fault_in_served_name(name):
        raise RepositoryError(f"{path}: {fault}", hint="give it another `name`")
    if "://" in base:
        raise RepositoryError(
            f"{where}: base_path {base} is not a folder of this machine",
            hint="serve a remote store itself: --model-store, with a folder of that name for each model",
        )
    _check_keys(config, _KNOWN, where)
    for key, (harmless, reason) in _REFUSED.items():
        if config.get(key) not in (None, "", *harmless):
            raise RepositoryError(f"{where}: {key} cannot be met: {reason}", hint="remove it, or change the graph")
    return OvmsModel(
        name=name,
        folder=path.parent / base,
        properties=dict(_read_properties(config, where)),
        policy=_read_policy(config, where),
        notes=tuple(f"{where}: {note}" for note in _notes(config)),
    )


def _notes(config: Mapping[str, Any]) -> Iterator[str]:
    for key, reason in _UNUSED.items():
        if key in config:
            yield f"{key} has no effect: {reason}"
    for key in ("batch_size", "shape"):
        if config.get(key) == "auto":
            yield f"{key} has no effect: {_SAVED_SHAPES}"


def _read_properties(config: Mapping[str, Any], where: str) -> Iterator[tuple[str, str]]:
    properties = config.get("plugin_config") or {}
    if not isinstance(properties, dict):
        raise RepositoryError(f"{where}: plugin_config must be an object")
    for key, value in properties.items():
        if not isinstance(value, str | int | float):
            raise RepositoryError(f"{where}: plugin_config: {key} must be a word or a number")
        yield key, ("YES" if value else "NO") if isinstance(value, bool) else str(value)
    if device := config.get("target_device"):
        yield "TARGET_DEVICE", str(device)


def _read_policy(config: Mapping[str, Any], where: str) -> ModelConfigProto | None:
    """Read a version policy, which has the same words as Triton's."""
    policy = config.get(_POLICY)
    if not policy:
        return None
    try:
        return json_format.ParseDict({"version_policy": policy}, ModelConfigProto())
    except json_format.ParseError as error:
        raise RepositoryError(f"{where}: {_POLICY}: {error}") from error
