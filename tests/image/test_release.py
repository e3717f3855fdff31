"""A release: the wheel, built from the source distribution, installed, and serving."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import running
from readme_renderer import markdown
from running import StartServer

pytestmark = [pytest.mark.server, pytest.mark.image]

TREES = ("backend", "client", "converters", "scripts", "model_repository")
FILES = ("pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", ".gitignore")


def run(*line: str | Path, cwd: Path | None = None) -> str:
    finished = subprocess.run([*map(str, line)], cwd=cwd, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The released files without git."""
    folder = tmp_path_factory.mktemp("release") / "source"
    for tree in TREES:
        shutil.copytree(repository / tree, folder / tree, ignore=shutil.ignore_patterns("__pycache__", ".cache"))
    for file in FILES:
        shutil.copy(repository / file, folder / file)
    return folder


@pytest.fixture(scope="module")
def dist(source: Path) -> Path:
    """Both distributions."""
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", source.parent / "dist", cwd=source)
    return source.parent / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    return dist / "graphkiln-0.1.0-py3-none-any.whl"


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as opened:
        return Parser().parsestr(opened.read("graphkiln-0.1.0.dist-info/METADATA").decode())


@pytest.fixture(scope="module")
def commands(wheel: Path) -> Path:
    """An environment with the wheel, and the libraries of this environment without the checkout.

    That the wheel's requirements are complete is tested by the image, whose lock file is made from its extras.
    """
    folder = wheel.parent.parent / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    own = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (own / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder / "bin"


def test_the_version_is_that_of_the_project(dist: Path) -> None:
    assert sorted(path.name for path in dist.iterdir()) == [
        "graphkiln-0.1.0-py3-none-any.whl",
        "graphkiln-0.1.0.tar.gz",
    ]


def test_the_source_distribution_has_all_that_is_released(source: Path, dist: Path) -> None:
    with tarfile.open(dist / "graphkiln-0.1.0.tar.gz") as opened:
        packed = {name.partition("/")[2] for name in opened.getnames()} - {"PKG-INFO"}
    assert packed == {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()}


def test_the_wheel_has_our_packages_and_no_other(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as opened:
        tops = {name.partition("/")[0] for name in opened.namelist()}
        assert "graphkiln-0.1.0.dist-info/licenses/LICENSE" in opened.namelist()
    packages = {"graphkiln", "graphkiln_backend", "graphkiln_client", "graphkiln_converters"}
    assert tops == packages | {"graphkiln-0.1.0.dist-info"}


def test_its_readme_renders_as_an_index_shows_it(metadata: Message, repository: Path) -> None:
    assert metadata["Description-Content-Type"] == "text/markdown"
    text = metadata.get_payload()
    assert text == (repository / "README.md").read_text()
    page = markdown.render(text)
    assert page is not None
    assert page.count("<table>") > 1
    assert "```" not in page


def test_installed_it_serves_and_classifies(
    commands: Path, start_server: StartServer, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running, "COMMAND", (str(commands / "graphkiln"),))
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert running.run_command("--version").stdout == "graphkiln 0.1.0\n"
    found = run(commands / "python", "-c", "import graphkiln_backend; print(graphkiln_backend.__path__[0])")
    assert Path(found).is_relative_to(commands.parent)
    server = start_server("--model-store", repository / "model_repository", "--cache", "off")
    server.wait_ready()
    seven = repository / "docs" / "digits" / "seven.png"
    answer = running.run_command("classify", seven, "--model", "digits", "--url", server.url, "--json")
    assert json.loads(answer.stdout)[0]["classifications"][0]["label"] == "seven", answer.stderr
    assert server.stop()[0] == 0
