"""Checks of models, local and remote."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import zoo
from ir_files import product, save_ir

from graphkiln.doctor import models as module
from graphkiln.doctor.examination import Finding, Level, Request
from graphkiln.doctor.models import (
    Need,
    check_models,
    check_remote_stores,
    find_fit,
    find_missing_engines,
    is_one_model,
    need_of,
    size_of,
    try_models,
)
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES_LINE
from graphkiln_backend.repository import importers
from graphkiln_backend.storage.address import RemoteAddress, RemoteStoreError
from graphkiln_backend.storage.files import RemoteFile, RemoteFiles

HOUR_S = 3600


@pytest.fixture
def store(tmp_path: Path, digits: Path) -> Path:
    shutil.copytree(digits, tmp_path / "store" / "digits")
    return tmp_path / "store"


def check(*stores: Path) -> dict[str, Finding]:
    return {found.subject: found for found in check_models(Request(stores=stores))}


def test_models_in_openvino_ir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, elsewhere = tmp_path / "store", tmp_path / "models"
    save_ir(product(), elsewhere / "net" / "1" / "any.xml")
    store.mkdir()
    monkeypatch.setattr(module, "start_probe", lambda name: name)
    monkeypatch.setattr(module, "read_probe", lambda _: ({"cpu": ""}, ""))
    model = {"name": "one", "base_path": "../models/net"}
    (store / "config.json").write_text(json.dumps({"model_config_list": [{"config": model}]}))
    assert check(store)["net"].message == "version 1: whole, no golden samples"
    monkeypatch.setattr(module, "read_probe", lambda _: ({}, "it is not installed"))
    assert "requests openvino on cpu, which cannot be used" in check(elsewhere)["net"].message
    (store / "config.json").write_text('{"model_config_list": [{}]}')
    assert check(store)[str(store)].level is Level.ERROR


def test_models_of_other_backends(store: Path) -> None:
    for name, config in {
        "adopted": 'backend: "python"',
        "bare": 'backend: "python"',
        "plan": 'platform: "tensorrt_plan"',
    }.items():
        shutil.copytree(store / "digits", store / name)
        (store / name / "config.pbtxt").write_text(config)
    for name in ("manifest.json", "golden.npz"):
        (store / "bare" / "1" / name).unlink()
    found = check(store)
    assert (found["adopted"].level, found["bare"].level, found["plan"].level) == (Level.OK, Level.WARNING, Level.ERROR)
    assert "proven by its golden samples" in found["adopted"].message
    assert "unproven" in found["bare"].message
    assert "graphkiln adopt STORE/bare" in found["bare"].hint
    assert "not installed" in found["plan"].message


def test_ensembles_are_tritons(store: Path) -> None:
    for name, step in {"whole": "digits", "typo": "digit"}.items():
        (store / name / "1").mkdir(parents=True)
        (store / name / "config.pbtxt").write_text(
            f'platform: "ensemble" ensemble_scheduling {{ step {{ model_name: "{step}" model_version: -1 }} }}'
        )
    found = check(store)
    assert (found["whole"].level, found["whole"].message) == (Level.OK, "ensemble of digits")
    assert (found["typo"].level, found["typo"].hint) == (Level.ERROR, "did you mean 'digits'?")


def test_a_backend_that_is_named_as_a_platform(store: Path) -> None:
    (store / "digits" / "config.pbtxt").write_text('platform: "onnxruntime"')
    assert 'write backend: "onnxruntime"' in check(store)["digits"].hint


def test_damaged_openvino_ir(tmp_path: Path) -> None:
    path = save_ir(product(), tmp_path / "net" / "1" / "model.xml")
    os.truncate(path.with_suffix(".bin"), 4)
    assert "is cut short" in check(tmp_path)["net"].message


def test_intact_model(store: Path) -> None:
    found = check(store)
    assert found["digits"].message == "version 1: whole, golden samples"
    assert {each.level for each in found.values()} == {Level.OK}
    assert found["shared memory"].facts["instances"] == 1


@pytest.mark.parametrize(
    ("file", "words"), [("model.onnx", "SHA-256"), ("golden.npz", "SHA-256"), ("manifest.json", "manifest")]
)
def test_damaged_file(store: Path, file: str, words: str) -> None:
    path = store / "digits" / "1" / file
    path.write_bytes(path.read_bytes()[:-20])
    found = check(store)["digits 1"]
    assert found.level is Level.ERROR
    assert words in found.message
    assert found.hint


def test_missing_labels(store: Path) -> None:
    for name in ("manifest.json", "golden.npz"):
        (store / "digits" / "1" / name).unlink()
    (store / "digits" / "config.pbtxt").write_text('output { name: "OUTPUT_0" label_filename: "names.txt" }')
    found = check(store)["digits"]
    assert (found.level, "do not exist: names.txt" in found.message) == (Level.ERROR, True)
    assert "label_filename" in found.hint


def test_seat(store: Path, tmp_path: Path) -> None:
    assert "seat of digits" not in check(store)
    backend = tmp_path / "backends" / "onnxruntime"
    backend.mkdir(parents=True)
    for file in ("libtriton_onnxruntime.so", "libonnxruntime.so.1.23.0"):
        (backend / file).touch()
    request = Request(stores=(store,), arguments=(f"--backend-directory={backend.parent}",))
    found = {each.subject: each for each in check_models(request)}["seat of digits"]
    assert found.message == "native (Triton's C++ onnxruntime backend, ONNX Runtime 1.23.0)"
    assert found.facts["native"] is True
    shutil.copytree(store / "digits" / "1", store / "digits" / "2")
    for name in ("manifest.json", "golden.npz"):
        (store / "digits" / "1" / name).unlink()  # of a version that is not served
    found = {each.subject: each for each in check_models(request)}["seat of digits"]
    assert found.facts["native"] is True
    with (store / "digits" / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "self_test" value { string_value: "off" } }')
    found = {each.subject: each for each in check_models(request)}["seat of digits"]
    assert (found.level, found.facts["native"]) == (Level.OK, False)
    assert "self_test is off" in found.message
    with (store / "digits" / "config.pbtxt").open("a") as file:
        file.write('parameters { key: "seat" value { string_value: "native" } }')
    for refused in ({each.subject: each for each in check_models(request)}, check(store)):
        assert refused["seat of digits"].level is Level.ERROR
        assert "leave seat out" in refused["seat of digits"].hint


def test_broken_version_beside_an_intact_one(store: Path) -> None:
    shutil.copytree(store / "digits" / "1", store / "digits" / "2")
    (store / "digits" / "2" / "model.onnx").unlink()
    found = check(store)
    assert found["digits 1"].level is Level.OK
    assert found["digits 2"].level is Level.ERROR


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max_batch_sise: 8", "max_batch_sise"),
        ('parameters [ { key: "precision" value { string_value: "fp7" } } ]', "fp7"),
        ('parameters { key: "parallel" value { string_value: "pipeline=9999" } }', "served: pipeline=9999"),
        ('parameters { key: "parallel" value { string_value: "data=3" } }', "served: data=3"),
        ('parameters { key: "parallel" value { string_value: "data=1" } }', ""),
    ],
)
def test_invalid_configuration(store: Path, text: str, words: str) -> None:
    with (store / "digits" / "config.pbtxt").open("a") as config:
        config.write(f"\n{text}\n")
    found = check(store)["digits"]
    assert found.level is (Level.ERROR if words else Level.OK)
    assert words in found.message


@pytest.mark.parametrize(
    ("more", "level"),
    [("", Level.ERROR), (', { key: "fallback" value { string_value: "onnxruntime" } }', Level.WARNING)],
)
def test_unavailable_engine(store: Path, monkeypatch: pytest.MonkeyPatch, more: str, level: Level) -> None:
    monkeypatch.setattr(module, "start_probe", lambda name: name)
    monkeypatch.setattr(
        module,
        "read_probe",
        lambda name: ({"cpu": ""}, "") if name == "openvino" else ({}, "unknown engine"),
    )
    config = store / "digits" / "config.pbtxt"
    wanted = f'parameters [ {{ key: "engine" value {{ string_value: "openvino" }} }}{more} ]'
    config.write_text(f"{config.read_text()}\n{wanted}\n")
    need = need_of(store / "digits")
    assert (need.engine, need.device) == ("openvino", "cpu")
    assert list(find_missing_engines([need])) == []
    (found,) = find_missing_engines([replace(need, engine="openvin")])
    assert (found.subject, found.level) == ("digits", level)
    assert "cannot be used: unknown engine" in found.message
    (nowhere,) = find_missing_engines([replace(need, device="gpu:7")])
    assert "there is no gpu:7 here" in nowhere.message


def test_model_without_version(store: Path) -> None:
    (store / "broken").mkdir()
    (store / "broken" / "config.pbtxt").touch()
    found = check(store)["broken"]
    assert found.level is Level.ERROR
    assert found.hint == "make broken/1/model.onnx"


def test_folder_without_model(store: Path) -> None:
    """The server ignores such folders, too."""
    (store / "empty").mkdir()
    found = check(store)
    assert (found["digits"].level, found["empty"].level) == (Level.OK, Level.WARNING)
    assert "ignored: the folder is empty" in found["empty"].message


def test_unreadable_folder(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = module.versions_of
    (store / "theirs" / "1").mkdir(parents=True)
    (store / "lost+found").mkdir()

    def refuse(model: Path) -> list[Path]:
        if model.name == "theirs":
            raise PermissionError(13, "Permission denied", str(model))
        return read(model)

    monkeypatch.setattr(module, "versions_of", refuse)
    found = check(store)
    assert (found["digits"].level, found["theirs"].level) == (Level.OK, Level.ERROR)
    assert "Permission denied" in found["theirs"].message
    assert "lost+found" not in found


def test_invalid_stores(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "none").mkdir()
    found = check(tmp_path / "gone", tmp_path / "file", tmp_path / "none")
    assert [each.level for each in found.values()] == [Level.ERROR, Level.ERROR, Level.WARNING]
    assert list(check_models(Request())) == []


def test_large_stores_are_not_hashed(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_HASHED_BYTES", 1000)
    found = check(store)["digits"]
    assert "not hashed" in found.message
    assert "graphkiln verify" in found.hint


def test_graph_of_another_framework(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Flow:
        framework = "OneFlow"

        def find_saved(self, version: Path) -> Path | None:
            return version / "model" if (version / "model").is_dir() else None

    monkeypatch.setattr(importers, "load_importers", lambda: [Flow()])
    (store / "flow" / "1" / "model").mkdir(parents=True)
    assert "saved by OneFlow" in check(store)["flow"].message
    assert need_of(store / "flow").instances == 1


@pytest.mark.parametrize(("age_s", "level"), [(10, Level.OK), (2 * HOUR_S, Level.WARNING)])
def test_unfinished_version(store: Path, age_s: int, level: Level) -> None:
    half = store / "digits" / ".graphkiln-abc"
    half.mkdir()
    changed_s = half.stat().st_mtime - age_s
    os.utime(half, (changed_s, changed_s))
    found = check(store)["digits/.graphkiln-abc"]
    assert found.level is level
    assert half.is_dir()


def test_insufficient_resources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphkiln_backend.server.limits._allowed_by_groups", lambda: [(2048, "a larger limit")])
    monkeypatch.setattr("graphkiln_backend.server.limits._allowed_to_user", lambda: ())
    monkeypatch.setattr("graphkiln_backend.server.limits.resource.getrlimit", lambda _: (1024, 4096))
    shared, memory, threads, files = find_fit([Need(instances=100_000, shared_bytes=1 << 50, graph_bytes=0)])
    assert (shared.level, memory.level, threads.level, files.level) == (
        Level.ERROR, Level.WARNING, Level.ERROR, Level.ERROR,
    )  # fmt: skip
    assert "--shm-size=" in shared.hint
    assert files.message.startswith("no more than 4096 files may be open at once: a server of 100000 model instances")
    assert "2048 more may run here" in threads.message
    assert "fewer instances" in memory.hint
    assert threads.hint.startswith("a larger limit")


def test_size_does_not_follow_links(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to("/usr")
    assert size_of(tmp_path) < 1100


def test_model_as_store(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    subjects = [finding.subject for finding in check_models(Request(stores=(tmp_path / "m",)))]
    assert "m 1" in subjects


def test_needs_include_image_models(store: Path) -> None:
    plain = need_of(store / "digits")
    with (store / "digits" / "config.pbtxt").open("a") as config:
        config.write(ACCEPT_IMAGES_LINE)
    need = need_of(store / "digits")
    assert need.instances >= plain.instances + 2
    assert need.shared_bytes >= plain.shared_bytes + (2 << 20)


# Remote stores.

ADDRESS = RemoteAddress.parse("s3://bucket/store")
assert ADDRESS


@pytest.mark.parametrize(
    ("listing", "level", "words"),
    [
        ({"a/1/model.onnx": RemoteFile("x", 2048), "b/1/x": RemoteFile("y", 0)}, Level.OK, "2 models, 2 files, 2 KiB"),
        ({"README.md": RemoteFile("x", 9)}, Level.WARNING, "no model"),
        (RemoteStoreError("s3://bucket/store: access is denied", hint="AWS_PROFILE"), Level.ERROR, "access is denied"),
    ],
)
def test_remote_stores(
    listing: dict[str, RemoteFile] | Exception, level: Level, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def list_(_: RemoteFiles) -> dict[str, RemoteFile]:
        if isinstance(listing, Exception):
            raise listing
        return listing

    monkeypatch.setattr(RemoteFiles, "list", list_)
    (finding,) = check_remote_stores(Request(remote=(ADDRESS,)))
    assert (finding.subject, finding.level) == ("s3://bucket/store", level)
    assert words in finding.message


@pytest.mark.parametrize(
    ("listing", "is_model"),
    [
        (["1/model.onnx", "2/model.onnx"], True),
        (["config.pbtxt"], True),
        (["model.onnx", "golden.npz"], True),
        (["m/1/model.onnx"], False),
        (["README.md"], False),
        ([], False),
    ],
)
def test_is_one_model(listing: list[str], is_model: bool) -> None:
    assert is_one_model(listing) is is_model


def test_versions_that_would_be_refused_are_tried(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [zoo.value("x", ("n", 3))], [zoo.value("y", ("n", 3))]
    zoo.add(store, "odd", zoo.model([zoo.helper.make_node("NoSuchOperator", ["x"], ["y"])], *ends), "max_batch_size: 4")
    zoo.add(store, "gpu", zoo.scale(("n", 3)), "max_batch_size: 4 instance_group { kind: KIND_GPU }")
    (found,) = try_models(Request(stores=(store,)))
    assert (found.subject, found.level) == ("odd 1", Level.ERROR)
    assert "NoSuchOperator" in found.message
    assert "write kind: KIND_CPU" in check(store)["gpu"].hint
    monkeypatch.setattr(module, "_TRY_S", 0.0)
    (found,) = try_models(Request(stores=(store,)))
    assert (found.subject, found.message, found.level) == ("not loaded here", "odd 1, digits 1", Level.OK)
