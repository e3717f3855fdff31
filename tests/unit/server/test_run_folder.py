"""The folder of a server run: what it holds, and that it goes."""

from __future__ import annotations

import ast
import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.repository.config import BACKEND
from graphkiln_backend.server import installation
from graphkiln_backend.server import run_folder as module
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.run_folder import (
    BACKEND_NAMES,
    SHARED_MEMORY,
    RunFolder,
    backend_names,
    installed_backend_names,
    remove_sent_models,
    temporary_parent,
)


def test_never_holds_a_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spaced = tmp_path / "with space"
    spaced.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(spaced))
    with RunFolder() as folder:
        assert " " not in str(folder.path)
        assert folder.path.is_dir()
    assert not folder.path.exists()


@pytest.mark.parametrize("name", sorted(BACKEND_NAMES))
def test_a_stub_looks_in_the_working_folder_last(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('shadowed')")
    monkeypatch.chdir(tmp_path)
    with RunFolder() as folder:
        folder.assemble_backends(installation, None)
        head = (folder.backends / name / "model.py").read_text().partition("from graphkiln")[0]
    program = "import sys; sys.path.insert(0, ''); exec(sys.argv[1]); import json"
    done = subprocess.run([sys.executable, "-P", "-c", program, head], stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", ["model.py", "model/__init__.py"])
def test_a_working_folder_with_a_module_that_shadows_the_backend_is_refused(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).touch()
    monkeypatch.chdir(tmp_path)
    with RunFolder() as folder, pytest.raises(ServerSetupError, match=f"Triton would run .*{path}") as raised:
        folder.assemble_backends(installation, None)
    assert raised.value.hint == "start the server in a folder without a Python module named model"


def test_a_folder_of_models_shadows_nothing(
    installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    with RunFolder() as folder:
        assert BACKEND in folder.assemble_backends(installation, None)


def test_everything_is_removed_at_the_end_whatever_lies_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with RunFolder() as folder:
        assert folder.path.parent == tmp_path
        for inside in (folder.instances, folder.shared, folder.temporary):
            (inside / "deep" / "deeper").mkdir(parents=True)
            (inside / "deep" / "file").write_text("left")
    assert list(tmp_path.iterdir()) == []


def test_a_linked_store_outlives_the_folder(tmp_path: Path) -> None:
    store = tmp_path / "a store"
    (store / "m").mkdir(parents=True)
    with RunFolder() as folder:
        (link,) = folder.link_stores([store])
        assert (link / "m").is_dir()
    assert (store / "m").is_dir()


def test_shared_memory_of_a_killed_server_is_removed_and_no_other() -> None:
    with RunFolder() as folder, RunFolder() as other:
        mine = [SHARED_MEMORY / f"{folder.shared_memory_prefix}0", SHARED_MEMORY / f"{folder.path.name}-of-before"]
        others = SHARED_MEMORY / f"{other.shared_memory_prefix}0"
        for region in (*mine, others):
            region.touch()
        folder.close()
        assert not any(region.exists() for region in mine)
        assert others.exists()
    assert not others.exists()


def test_a_temporary_folder_that_is_missing_is_an_error_with_the_fix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    monkeypatch.setattr(module, "OTHER_PARENTS", ())
    with pytest.raises(ServerSetupError, match=r"cannot make a temporary folder: .*gone is missing") as raised:
        RunFolder()
    assert raised.value.hint.startswith("set TMPDIR to a folder that can be written")


class TestPlaces:
    """If TMPDIR is full or unusable, the next folder is used, with a warning."""

    @pytest.fixture
    def places(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
        places = [tmp_path / name for name in ("first", "second", "third")]
        for place in places:
            place.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(places[0]))
        monkeypatch.setattr(module, "OTHER_PARENTS", tuple(places[1:]))
        return places

    def test_one_that_is_full_gives_way(
        self, places: list[Path], monkeypatch: pytest.MonkeyPatch, logged: list[str]
    ) -> None:
        free = {place: SimpleNamespace(free=10 << 30 if place == places[2] else 0) for place in places}
        monkeypatch.setattr(module.shutil, "disk_usage", free.__getitem__)
        assert temporary_parent() == places[2]
        assert logged == [f"{places[0]} is full: using {places[2]} for temporary files"]

    def test_one_that_is_gone_gives_way(self, places: list[Path], logged: list[str]) -> None:
        places[0].rmdir()
        with RunFolder() as folder:
            assert folder.path.parent == places[1]
        assert "first is missing" in logged[0]

    def test_so_does_one_that_no_program_can_be_started_from(
        self, places: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        class NoExec:
            f_flag, f_bavail, f_frsize = os.ST_NOEXEC, 1 << 30, 1

        statvfs = os.statvfs
        monkeypatch.setattr(os, "statvfs", lambda place: NoExec if place == places[0] else statvfs(place))
        assert temporary_parent() == places[1]


def test_status_files_lie_in_memory_and_go_with_the_run() -> None:
    with RunFolder() as folder:
        assert folder.instances.parent == folder.path
        place = folder.instances.resolve()
        assert place.parent == SHARED_MEMORY
        assert place.stat().st_mode & 0o077 == 0
        (folder.instances / "1.json").write_text("{}")
        assert (place / "1.json").is_file()
    assert not place.exists()


def test_a_full_temporary_folder_is_one_line_with_the_fix(
    installation: Installation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shutil, "copy2", fail)
    with RunFolder() as folder, pytest.raises(ServerSetupError, match="is full: No space left") as raised:
        folder.assemble_backends(installation, None)
    assert raised.value.hint == "make room there, or set TMPDIR to another folder"


def test_shared_memory_that_cannot_be_written_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(_: Path) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(module, "create_locked", fail)
    with pytest.raises(ServerSetupError, match=r"cannot make a file in /dev/shm.*Read-only") as raised:
        RunFolder()
    assert "--shm-size" in raised.value.hint
    assert list(tmp_path.iterdir()) == []


class TestBackends:
    def test_the_python_backend_is_copied_with_the_stub_of_this_python(
        self, installation: Installation, tmp_path: Path
    ) -> None:
        stub = tmp_path / "stubs" / "triton_python_backend_stub"
        stub.parent.mkdir()
        stub.write_text("this python's")
        with RunFolder() as folder:
            folder.assemble_backends(dataclasses.replace(installation, stub=stub), None)
            python = folder.backends / "python"
            assert (python / "triton_python_backend_stub").read_text() == "this python's"
            assert (python / "libtriton_python.so").is_file()
            assert not any(path.is_symlink() for path in (python, *python.iterdir()))

    def test_its_folder_for_environments_is_that_of_the_run(self, installation: Installation) -> None:
        library = installation.backends / "python" / "libtriton_python.so"
        library.write_bytes(b"\0error.\0/tmp/python_env_Failed")
        with RunFolder() as folder:
            folder.assemble_backends(installation, None)
            content = (folder.backends / "python" / library.name).read_bytes()
            name = content.removeprefix(b"\0error.\0").removesuffix(b"Failed").decode()
            assert len(content) == len(library.read_bytes())
            assert name == f"/tmp/gk-{folder.path.name.removeprefix('graphkiln-')}"
            made = Path(f"{name}aB3xYz")
            made.mkdir()
        assert not made.exists()

    @pytest.mark.parametrize("content", [b"/tmp/elsewhere_", b"/tmp/python_env_ /tmp/python_env_"])
    def test_a_backend_of_another_release_is_copied_as_it_is(self, installation: Installation, content: bytes) -> None:
        library = installation.backends / "python" / "libtriton_python.so"
        library.write_bytes(content)
        with RunFolder() as folder:
            folder.assemble_backends(installation, None)
            assert (folder.backends / "python" / library.name).read_bytes() == content

    def test_every_name_loads_the_model_class(self, installation: Installation) -> None:
        with RunFolder() as folder:
            names = folder.assemble_backends(installation, None)
            assert names == BACKEND_NAMES
            for name in names:
                source = (folder.backends / name / "model.py").read_text()
                statements = [node for node in ast.parse(source).body if isinstance(node, ast.ImportFrom)]
                imported = [(node.module, [alias.name for alias in node.names]) for node in statements]
                assert imported == [
                    ("graphkiln_backend.triton.instance", ["TritonPythonModel"]),
                ]
                assert all(find_spec(module) for module, _ in imported if module)

    def test_an_installed_onnxruntime_backend_is_kept_unless_it_is_to_be_replaced(
        self, installation: Installation
    ) -> None:
        installed = installation.backends / "onnxruntime"
        installed.mkdir()
        with RunFolder() as folder:
            assert "onnxruntime" not in folder.assemble_backends(installation, None)
            assert (folder.backends / "onnxruntime").readlink() == installed
        with RunFolder() as folder:
            assert "onnxruntime" in folder.assemble_backends(installation, None, replace_onnxruntime=True)
            assert (folder.backends / "onnxruntime" / "model.py").is_file()
        assert list(installed.iterdir()) == []

    def test_the_users_backends_go_before_the_installations(self, installation: Installation, tmp_path: Path) -> None:
        for root in (tmp_path / "extra", installation.backends):
            (root / "custom").mkdir(parents=True)
        (installation.backends / "another").mkdir()
        with RunFolder() as folder:
            folder.assemble_backends(installation, tmp_path / "extra")
            assert (folder.backends / "custom").readlink() == tmp_path / "extra" / "custom"
            assert (folder.backends / "another").readlink() == installation.backends / "another"

    def test_a_relative_folder_of_backends_is_linked_by_its_whole_path(
        self, installation: Installation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "extra" / "custom").mkdir(parents=True)
        monkeypatch.chdir(tmp_path)
        with RunFolder() as folder:
            folder.assemble_backends(installation, Path("extra"))
            assert (folder.backends / "custom").is_dir()

    def test_a_backend_folder_that_is_none_is_an_error(self, installation: Installation, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for extra in (tmp_path / "gone", tmp_path / "file"):
            with RunFolder() as folder, pytest.raises(ServerSetupError, match="is not a folder"):
                folder.assemble_backends(installation, extra)

    @pytest.mark.parametrize(
        ("installed", "replace", "names"),
        [
            ((), False, {"graphkiln", "onnxruntime", "oneflow", "openvino"}),
            (("python", "tensorflow"), False, {"graphkiln", "onnxruntime", "oneflow", "openvino"}),
            (("onnxruntime",), False, {"graphkiln", "oneflow", "openvino"}),
            (("onnxruntime",), True, {"graphkiln", "onnxruntime", "oneflow", "openvino"}),
            (("onnxruntime", "oneflow"), True, {"graphkiln", "onnxruntime", "openvino"}),
            (("openvino",), True, {"graphkiln", "onnxruntime", "oneflow"}),
            (("graphkiln",), False, {"graphkiln", "onnxruntime", "oneflow", "openvino"}),
        ],
    )
    def test_names_beside_what_is_installed(
        self, tmp_path: Path, installed: tuple[str, ...], replace: bool, names: set[str]
    ) -> None:
        for name in installed:
            (tmp_path / name).mkdir()
        assert backend_names([tmp_path], replace_onnxruntime=replace) == names


class TestStores:
    @pytest.mark.parametrize("name", ["with space", "a;b", "$HOME", "quo'te", "ünïcode", "new\nline"])
    def test_a_name_that_a_shell_would_change_is_linked(self, tmp_path: Path, name: str) -> None:
        with RunFolder() as folder:
            (link,) = folder.link_stores([tmp_path / name])
            assert link == folder.path / "stores" / "0"
            assert link.readlink() == tmp_path / name

    def test_a_relative_store_is_made_absolute(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with RunFolder() as folder:
            plain, link = folder.link_stores([Path("models"), Path("my models")])
            assert plain == tmp_path / "models"
            assert link.readlink() == tmp_path / "my models"


# What Triton puts into /tmp wherever TMPDIR leads.


@pytest.mark.parametrize("noting", ["shared", "overlay"])
def test_models_that_were_sent_go_with_their_run(tmp_path: Path, noting: str) -> None:
    with TemporaryDirectory(prefix="kept", dir="/tmp") as kept:
        sent = Path(f"/tmp/folder{os.getpid() % 1_000_000:06d}")
        sent.mkdir()
        notes = tmp_path / noting / "sent"
        notes.mkdir(parents=True)
        for folder in (sent, Path(kept)):
            (notes / folder.name).symlink_to(folder)
        remove_sent_models(tmp_path)
        assert not sent.exists()
        assert Path(kept).is_dir()


@pytest.mark.parametrize("version", [1, 2], ids=["serving", "failed"])
def test_a_placeholder_that_was_killed_before_it_noted_its_folder_goes_with_its_run(
    tmp_path: Path, version: int
) -> None:
    sent = Path(f"/tmp/folder{os.getpid() % 1_000_000:06d}")
    for run, left in ((tmp_path / "another", True), (tmp_path / "run", False)):
        (sent / "1").mkdir(parents=True, exist_ok=True)
        code = Mirror(tmp_path / "run" / "overlay").forget([2], serving=[1]).files[f"{version}/model.py"]
        (sent / "1" / "model.py").write_text(code)
        remove_sent_models(run)
        assert sent.exists() == left


# The names of our backend, where Triton is installed and where it is not.


def test_names_that_another_backend_has_are_not_ours() -> None:
    names = installed_backend_names()
    assert "graphkiln" in names
    assert names <= BACKEND_NAMES


def test_without_a_triton_all_are_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def find() -> None:
        raise ServerSetupError("no tritonserver")

    monkeypatch.setattr(installation, "find_installation", find)
    assert installed_backend_names() == BACKEND_NAMES
