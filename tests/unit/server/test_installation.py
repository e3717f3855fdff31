"""Finding a tritonserver, without starting it."""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.server import installation as finding
from graphkiln_backend.server.installation import Installation, find_installation

PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
MakeContainer = Callable[..., Path]


def test_the_container_comes_before_the_wheel(monkeypatch: pytest.MonkeyPatch, make_container: MakeContainer) -> None:
    monkeypatch.setattr(finding, "_CONTAINER", (root := make_container()))
    assert find_installation().binary == root / "bin" / "tritonserver"


def test_the_wheel_is_found() -> None:
    found = find_installation()
    assert found.stub.parent.name == PYTHON
    assert found.flags["http-port"]
    assert found.flags["disable-auto-complete-config"] is False


def test_a_container_of_another_python_is_refused(
    monkeypatch: pytest.MonkeyPatch, make_container: MakeContainer
) -> None:
    monkeypatch.setattr(finding, "_CONTAINER", make_container(python="3.6"))
    with pytest.raises(ServerSetupError, match=f"was not built for Python {PYTHON}"):
        find_installation()


def test_a_missing_libpython_names_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding.sysconfig, "get_config_var", lambda _: "/nonexistent")
    monkeypatch.setattr(finding.sys, "base_prefix", "/nonexistent")
    with pytest.raises(ServerSetupError, match=f"apt-get install libpython{PYTHON}"):
        find_installation()


def test_a_program_that_does_not_run(tmp_path: Path) -> None:
    broken = tmp_path / "tritonserver"
    broken.write_text("#!/bin/sh\necho 'cannot open shared object file' >&2; exit 127\n")
    broken.chmod(0o755)
    found = Installation(binary=broken, backends=tmp_path, caches=tmp_path, stub=tmp_path, libraries=())
    with pytest.raises(ServerSetupError, match="cannot open shared object file"):
        _ = found.flags


STUB = "triton_python_backend_stub"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Nothing on the PATH, no container, no wheel; returns an empty folder that is on both paths."""
    folder = tmp_path / "path"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(finding, "_CONTAINER", tmp_path / "no container")
    monkeypatch.setattr(finding, "find_spec", lambda _: None)
    return folder


def make_wheel(root: Path, *pythons: str) -> Path:
    """The files of the nvidia-pytriton wheel in a site-packages folder; returns the package."""
    package = root / "pytriton"
    for python in pythons:
        stub = package / "tritonserver" / "python_backend_stubs" / python / STUB
        stub.parent.mkdir(parents=True)
        stub.touch()
    return package


def install_wheel(monkeypatch: pytest.MonkeyPatch, package: Path) -> None:
    spec = ModuleSpec("pytriton", None, is_package=True)
    spec.submodule_search_locations = [str(package)]
    monkeypatch.setattr(finding, "find_spec", lambda name: spec if name == "pytriton" else None)


@pytest.mark.usefixtures("nothing_installed")
class TestFind:
    def test_nothing_is_an_error_with_the_fix(self) -> None:
        with pytest.raises(ServerSetupError, match="no tritonserver found") as raised:
            find_installation()
        assert raised.value.hint == "pip install 'graphkiln[serve]'"

    def test_a_program_on_the_path_comes_first(
        self, nothing_installed: Path, make_container: MakeContainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(finding, "_CONTAINER", make_container("container"))
        program = make_container("installed") / "bin" / "tritonserver"
        program.chmod(0o755)
        (nothing_installed / "tritonserver").symlink_to(program)
        found = find_installation()
        assert found.binary == program
        assert found.backends == program.parent.parent / "backends"
        assert found.caches == program.parent.parent / "caches"
        assert found.stub == found.backends / "python" / STUB

    def test_a_container_without_a_python_backend_is_refused(
        self, make_container: MakeContainer, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = make_container()
        (root / "backends" / "python" / STUB).unlink()
        monkeypatch.setattr(finding, "_CONTAINER", root)
        with pytest.raises(ServerSetupError, match=r"has no Python backend: .* is missing"):
            find_installation()

    def test_the_wheel_has_a_stub_per_python(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        package = make_wheel(tmp_path, "3.6", PYTHON)
        install_wheel(monkeypatch, package)
        found = find_installation()
        assert found.stub == package / "tritonserver" / "python_backend_stubs" / PYTHON / STUB
        assert found.binary == package / "tritonserver" / "bin" / "tritonserver"
        assert found.libraries[0] == tmp_path / "nvidia_pytriton.libs"

    def test_a_wheel_without_this_python_names_those_that_it_has(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        install_wheel(monkeypatch, make_wheel(tmp_path, "3.7", "3.6"))
        with pytest.raises(ServerSetupError, match=f"has no stub for Python {PYTHON}") as raised:
            find_installation()
        assert raised.value.hint == "it has 3.6, 3.7"


class TestLibpython:
    LIBRARY = f"libpython{PYTHON}.so.1.0"

    @pytest.mark.parametrize("place", ["lib", "lib/x86-triplet", "base/lib"])
    def test_the_shared_library_is_found_where_pythons_put_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str
    ) -> None:
        variables = {"LIBDIR": str(tmp_path / "lib"), "MULTIARCH": "x86-triplet"}
        monkeypatch.setattr(finding.sysconfig, "get_config_var", variables.get)
        monkeypatch.setattr(finding.sys, "base_prefix", str(tmp_path / "base"))
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / self.LIBRARY).touch()
        assert finding._libpython() == tmp_path / place

    def test_a_library_of_another_python_does_not_do(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(finding.sysconfig, "get_config_var", {"LIBDIR": str(tmp_path)}.get)
        monkeypatch.setattr(finding.sys, "base_prefix", str(tmp_path))
        (tmp_path / "libpython3.6.so.1.0").touch()
        monkeypatch.setattr(finding, "_python_version", lambda: "3.99")
        with pytest.raises(ServerSetupError, match=r"libpython3\.99\.so\.1\.0 is not installed"):
            finding._libpython()


class TestFlags:
    HELP = """Usage: tritonserver [options]
  --help
	Print usage
  --log-verbose <integer>
	Set verbose logging level. Not a flag: --nothing <here>.
  --exit-on-error <boolean>
	Exit the inference server.
  --disable-auto-complete-config
	If set, disables.
"""

    def program(self, installation: Installation, script: str) -> Installation:
        installation.binary.write_text(f"#!/bin/sh\n{script}\n")
        installation.binary.chmod(0o755)
        return installation

    @pytest.mark.parametrize("stream", ["1", "2"])
    def test_flags_are_read_from_the_programs_help(self, installation: Installation, stream: str) -> None:
        help_file = installation.binary.with_name("help.txt")
        help_file.write_text(self.HELP)
        found = self.program(installation, f"[ $1 = --help ] && cat {help_file} >&{stream}; exit 1")
        assert found.flags == {
            "help": False,
            "log-verbose": True,
            "exit-on-error": True,
            "disable-auto-complete-config": False,
        }

    def test_a_program_that_never_answers_is_ended(
        self, installation: Installation, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(finding, "_HELP_WITHIN_S", 0.1)
        found = self.program(installation, "exec sleep 600")
        with pytest.raises(ServerSetupError, match=r"does not run here: .*timed out"):
            _ = found.flags
        assert vars(found)["_help"].returncode == -signal.SIGKILL

    @pytest.mark.parametrize(("inherited", "value"), [(None, "/a:/b"), ("", "/a:/b"), ("/c:/d", "/a:/b:/c:/d")])
    def test_the_users_libraries_come_last(
        self, installation: Installation, monkeypatch: pytest.MonkeyPatch, inherited: str | None, value: str
    ) -> None:
        if inherited is None:
            monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
        else:
            monkeypatch.setenv("LD_LIBRARY_PATH", inherited)
        found = dataclasses.replace(installation, libraries=(Path("/a"), Path("/b")))
        assert found.library_path == value

    def test_the_last_line_of_an_error_is_the_cause(self, installation: Installation) -> None:
        with pytest.raises(ServerSetupError, match=r"does not run here: second$"):
            _ = self.program(installation, "echo first >&2; echo second >&2; exit 127").flags
