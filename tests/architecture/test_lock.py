"""The lock files of the images hold what pyproject.toml asks for, with hashes; nothing else is installed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
DEPLOY = REPOSITORY / "deploy"
LOCKS = {
    "cpu": "image/requirements-cpu.txt",
    "remote": "image/requirements-remote.txt",
    "gpu": "image/requirements-gpu.txt",
    "triton": "image/requirements-triton.txt",
    "build": "image/requirements-build.txt",
    "sbom": "image/requirements-sbom.txt",
    "score": "score/requirements.txt",
}
# Image -> the extras that it has.
ASKED = {
    "cpu": {"serve", "openvino", "page"},
    "remote": {"serve", "openvino", "page", "remote"},
    "gpu": {"gpu", "page"},
    "triton": {"triton", "openvino", "page"},
    "score": {"score", "openvino"},
}
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
SCORE_DOCKERFILE = (REPOSITORY / "deploy" / "score" / "Dockerfile").read_text()
LOCKED = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def locked(name: str) -> dict[str, Version]:
    text = (DEPLOY / LOCKS[name]).read_text()
    found = {canonicalize_name(package): Version(version) for package, version, _ in LOCKED.findall(text)}
    assert LOCKED.sub("", text).strip() == "", "a line that is no package with hashes"
    return found


def asked(extras: set[str]) -> list[Requirement]:
    """The requirements of the package and of some of its extras, which may name further ones."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    found = [Requirement(text) for text in project["dependencies"]]
    done: set[str] = set()
    while todo := extras - done:
        extra = todo.pop()
        done.add(extra)
        for requirement in map(Requirement, project["optional-dependencies"][extra]):
            if requirement.name == "graphkiln":
                extras = extras | requirement.extras
            elif requirement.marker is None or requirement.marker.evaluate({"platform_machine": "x86_64"}):
                found.append(requirement)
    return found


@pytest.mark.parametrize("image", ASKED)
def test_an_image_gets_what_is_asked_for(image: str) -> None:
    versions = locked(image)
    for requirement in asked(ASKED[image]):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not locked: see docs/releasing.md"
        assert version in requirement.specifier, f"{requirement} is not met by {version}: see docs/releasing.md"


def test_what_builds_our_wheel_is_locked_too() -> None:
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    versions = locked("build")
    for requirement in map(Requirement, build):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("other", ["build", "gpu", "remote", "score", "triton"])
def test_what_two_files_lock_is_one_version(other: str) -> None:
    cpu, versions = locked("cpu"), locked(other)
    if other == "triton":
        assert cpu.pop("numpy") < Version("2") < versions["numpy"]  # the wheel's Triton excludes what NVIDIA's wants
    assert {name: versions[name] for name in versions.keys() & cpu} == {
        name: cpu[name] for name in cpu.keys() & versions
    }


def test_the_gpu_image_has_cuda_of_the_kind_that_its_libraries_are_looked_for_in() -> None:
    """Wheels of CUDA 13 lie in nvidia/cu13, cuDNN beside it; those of CUDA 12 had a folder for each library."""
    nvidia = {name for name in locked("gpu") if name.startswith("nvidia-c")}
    assert {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cudnn-cu13"} <= nvidia
    line = next(line for line in DOCKERFILE.splitlines() if "LD_LIBRARY_PATH=" in line)
    folders = line.partition("=")[2].removesuffix(" \\").split(":")
    assert [folder.partition("/nvidia/")[2] for folder in folders] == ["cu13/lib", "cudnn/lib"]


def test_the_image_that_scores_keeps_the_ray_that_it_is_made_of() -> None:
    """Its lock file is installed over Ray's own image: another Ray would not be the one that KubeRay starts."""
    bases = re.findall(r"^FROM (\S+)", SCORE_DOCKERFILE, re.MULTILINE)
    assert {base.partition("-")[0] for base in bases} == {f"rayproject/ray:{locked('score')['ray']}"}


@pytest.mark.parametrize("dockerfile", ["Dockerfile", "deploy/score/Dockerfile"])
def test_nothing_is_installed_that_is_not_locked(dockerfile: str) -> None:
    """Everything that pip installs is in a lock file with hashes, or is our own wheel without dependencies."""
    text = (REPOSITORY / dockerfile).read_text().replace("\\\n", " ")
    installs = [each for line in text.splitlines() for each in re.findall(r"pip install ([^&|;]*)", line)]
    assert installs
    for words in installs:
        assert "--no-deps" in words
        assert "--require-hashes" in words or "--no-index" in words, words


@pytest.mark.parametrize("image", LOCKS)
def test_a_lock_file_is_used(image: str) -> None:
    file = LOCKS[image].rpartition("/")[2]
    assert f"deploy/{LOCKS[image]}" in DOCKERFILE + SCORE_DOCKERFILE
    assert f"-r /tools/{file}" in DOCKERFILE or f"-r /tmp/{file}" in SCORE_DOCKERFILE
