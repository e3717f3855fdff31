"""The image's lock file holds what pyproject.toml asks for, each package with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE = REPOSITORY / "deploy" / "image"
DOCKERFILE = (REPOSITORY / "Dockerfile").read_text()
LOCKED = re.compile(r"^([A-Za-z0-9_.-]+)==(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", re.MULTILINE)


def locked(name: str) -> dict[str, Version]:
    text = (IMAGE / name).read_text()
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
            else:
                found.append(requirement)
    return found


@pytest.mark.parametrize(("image", "extras"), [("cpu", {"serve", "openvino", "page"}), ("gpu", {"gpu", "page"})])
def test_an_image_gets_what_is_asked_for(image: str, extras: set[str]) -> None:
    versions = locked(f"requirements-{image}.txt")
    for requirement in asked(extras):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not locked: see docs/releasing.md"
        assert version in requirement.specifier, f"{requirement} is not met by {version}: see docs/releasing.md"


def test_what_builds_our_wheel_is_locked_too() -> None:
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    versions = locked("requirements-build.txt")
    for requirement in map(Requirement, build):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize("other", ["requirements-build.txt", "requirements-gpu.txt"])
def test_what_two_files_lock_is_one_version(other: str) -> None:
    cpu, versions = locked("requirements-cpu.txt"), locked(other)
    assert {name: versions[name] for name in versions.keys() & cpu} == {
        name: cpu[name] for name in cpu.keys() & versions
    }


def test_the_gpu_image_has_cuda_of_the_kind_that_its_libraries_are_looked_for_in() -> None:
    """Wheels of CUDA 13 lie in nvidia/cu13, cuDNN beside it; those of CUDA 12 had a folder for each library."""
    nvidia = {name for name in locked("requirements-gpu.txt") if name.startswith("nvidia-c")}
    assert {"nvidia-cublas", "nvidia-cuda-runtime", "nvidia-cudnn-cu13"} <= nvidia
    line = next(line for line in DOCKERFILE.splitlines() if "LD_LIBRARY_PATH=" in line)
    folders = line.partition("=")[2].removesuffix(" \\").split(":")
    assert [folder.partition("/nvidia/")[2] for folder in folders] == ["cu13/lib", "cudnn/lib"]
