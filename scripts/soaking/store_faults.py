"""Faults in the model store: bad versions, swapped files; and good versions that come and go."""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx
from onnx import numpy_helper

from graphkiln_backend.graph.errors import MeasurementError
from graphkiln_backend.graph.manifest import Labels, Manifest
from soaking.fault import Fault, Field, Over, at_once
from soaking.models import DIGITS, digit_labels, scaled_graph, write_version

_HOLD_S = 8.0
_LIVE_LIMIT_S = 60.0
_BAD = "9"
"""Number of each bad version: higher than all others, so that it would answer if it went live."""


class BadVersion(Fault):
    """A version that must not go live is put into the store, and taken away."""

    heavy = False
    hold_s = _HOLD_S

    def __init__(self, name: str, model: str, put: Callable[[Path], None]) -> None:
        self.name = f"bad version: {name}"
        self._model = model
        self._put = put

    def inject(self, field: Field) -> Over:
        self._put(field.store / self._model / _BAD)
        if not field.publish(self._model) and field.explicit:
            raise MeasurementError("the server says that it is loaded")
        return at_once

    def undo(self, field: Field) -> None:
        shutil.rmtree(field.store / self._model / _BAD)
        if trouble := field.publish(self._model):  # one that was loaded after all would stay for the rest of the soak
            raise MeasurementError(trouble)


class SwappedFile(Fault):
    """A file of a proven version is replaced while it serves, and put back."""

    heavy = False
    hold_s = _HOLD_S

    def __init__(self, file: str, change: Callable[[bytes], bytes]) -> None:
        self.name = f"swapped {file.rpartition('/')[2]}"
        self._file = file
        self._change = change

    def inject(self, field: Field) -> Over:
        replace_file(field.store / "digits" / self._file, self._change((DIGITS / self._file).read_bytes()))
        return at_once

    def undo(self, field: Field) -> None:
        replace_file(field.store / "digits" / self._file, (DIGITS / self._file).read_bytes())


class GoodVersion(Fault):
    """A new version goes live under traffic, and is taken away."""

    name = "good version added, removed"
    heavy = False
    hold_s = _HOLD_S
    model = "scaled"

    def __init__(self) -> None:
        self._next = 20  # above every bad one
        self.live_s: list[float] = []
        """Seconds until each was live."""

    def put(self, folder: Path, version: int) -> None:
        """Writes the version."""
        write_version(folder, scaled_graph(version))

    def inject(self, field: Field) -> Over:
        version = self._next = self._next + 1
        field.versions.add(self.model, version)
        begun = time.monotonic()
        self.put(field.store / self.model / str(version), version)
        if trouble := field.publish(self.model):
            raise MeasurementError(trouble)
        self._wait(field, version, live=True)
        self.live_s.append(time.monotonic() - begun)
        field.versions.announce(self.model, version)
        return at_once

    def _wait(self, field: Field, version: int, *, live: bool) -> None:
        """Until a version is live, or is no longer."""
        path = f"/v2/models/{self.model}/versions/{version}/ready"
        limit = time.monotonic() + _LIVE_LIMIT_S
        while (field.service.status(path) == 200) != live:
            if time.monotonic() > limit:
                raise MeasurementError(f"a good version is {'not ' * live}live after {_LIVE_LIMIT_S:.0f} s")
            time.sleep(0.1)

    def undo(self, field: Field) -> None:
        field.versions.withdraw(self.model, self._next)
        shutil.rmtree(field.store / self.model / str(self._next), ignore_errors=True)
        if trouble := field.publish(self.model):
            raise MeasurementError(trouble)
        self._wait(field, self._next, live=False)


class OtherContract(GoodVersion):
    """A good version whose classes are called otherwise goes live, and is taken away: nobody may get others' labels."""

    name = "good version of another contract"
    model = "digits"

    def __init__(self) -> None:
        super().__init__()
        self._next = 50

    def put(self, folder: Path, version: int) -> None:
        temporary = folder.parents[2] / f"{folder.parent.name}-{folder.name}.tmp"
        shutil.copytree(DIGITS / "1", temporary)
        labels = "".join(f"{label}\n" for label in digit_labels(version)).encode()
        (temporary / "labels.txt").write_bytes(labels)
        manifest = Manifest.read(temporary / "manifest.json")
        if not isinstance(manifest.labels, Labels):
            raise TypeError(f"{DIGITS} describes no labels")
        described = replace(manifest.labels, sha256=hashlib.sha256(labels).hexdigest())
        replace(manifest, labels=described).write(temporary / "manifest.json")
        temporary.rename(folder)


class UnloadLoad(Fault):
    """A model is unloaded by who has the key, and loaded again."""

    name = "unload, load"
    heavy = False
    hold_s = 2.0

    def inject(self, field: Field) -> Over:
        if trouble := field.service.unload("several"):
            raise MeasurementError(trouble)
        return at_once

    def undo(self, field: Field) -> None:
        if trouble := field.service.load("several"):
            raise MeasurementError(trouble)


def replace_file(path: Path, content: bytes) -> None:
    """Replaces a file by a rename."""
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(content)
    temporary.rename(path)


def _garbage(folder: Path) -> None:
    write_version(folder, b"\x08\x09 this is no graph")


def _cut_off(folder: Path) -> None:
    write_version(folder, (DIGITS / "1" / "model.onnx").read_bytes()[:5000])


def _empty(folder: Path) -> None:
    folder.mkdir()


def _half_copied(folder: Path) -> None:
    """The manifest and the graph are there, the golden samples are not yet."""
    _copy_whole(folder, "manifest.json", "model.onnx")


def _other_weights(folder: Path) -> None:
    """A whole version whose graph is not the one that was proven."""
    _copy_whole(folder, "manifest.json", "golden.npz", "labels.txt")
    replace_file(folder / "model.onnx", other_weights((DIGITS / "1" / "model.onnx").read_bytes()))


def _copy_whole(folder: Path, *names: str) -> None:
    folder.mkdir()
    for name in names:
        shutil.copyfile(DIGITS / "1" / name, folder / name)


def _other_labels_listed(folder: Path) -> None:
    """A whole version but for its labels, which are not those that its manifest describes."""
    _copy_whole(folder, "manifest.json", "golden.npz", "model.onnx")
    replace_file(folder / "labels.txt", _other_labels((DIGITS / "1" / "labels.txt").read_bytes()))


def _other_preprocessing(folder: Path) -> None:
    """A whole version but for its manifest, in which somebody changed how images are prepared."""
    _copy_whole(folder, "labels.txt", "golden.npz", "model.onnx")
    text = (DIGITS / "1" / "manifest.json").read_text()
    replace_file(folder / "manifest.json", text.replace("0.5", "0.4").encode())


def _unknown_operator(folder: Path) -> None:
    graph = scaled_graph(1)
    graph.graph.node[0].op_type = "NoSuchOperator"
    write_version(folder, graph)


def _other_signature(folder: Path) -> None:
    graph = scaled_graph(1)
    graph.graph.input[0].type.tensor_type.shape.dim[1].dim_value = 5
    write_version(folder, graph)


def other_weights(content: bytes) -> bytes:
    """The same graph with its largest weight negated: valid, fast, and wrong."""
    model = onnx.load_from_string(content)
    largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    largest.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(largest), largest.name))
    changed: bytes = model.SerializeToString()
    return changed


def _other_labels(content: bytes) -> bytes:
    return b"\n".join(reversed(content.split())) + b"\n"


def store_faults(*, explicit: bool) -> list[Fault]:
    """One of each that needs no disk of its own.

    Args:
        explicit: Whether the server loads nothing before it is told to.
    """
    return [
        *([UnloadLoad()] if explicit else []),
        BadVersion("garbage", "scaled", _garbage),
        BadVersion("cut off", "digits", _cut_off),
        BadVersion("empty folder", "scaled", _empty),
        BadVersion("half copied", "digits", _half_copied),
        BadVersion("other weights", "digits", _other_weights),
        BadVersion("other labels", "digits", _other_labels_listed),
        BadVersion("other preprocessing", "digits", _other_preprocessing),
        BadVersion("unknown operator", "scaled", _unknown_operator),
        BadVersion("other signature", "scaled", _other_signature),
        SwappedFile("1/model.onnx", other_weights),
        SwappedFile("1/labels.txt", _other_labels),
        GoodVersion(),
        OtherContract(),
    ]
