"""The image's lock file holds what pyproject.toml asks for, each package with hashes."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGE = REPOSITORY / "deploy" / "image"
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


def test_the_cpu_image_gets_what_is_asked_for() -> None:
    versions = locked("requirements-cpu.txt")
    for requirement in asked({"serve", "openvino"}):
        version = versions.get(canonicalize_name(requirement.name))
        assert version is not None, f"{requirement} is not locked: see docs/releasing.md"
        assert version in requirement.specifier, f"{requirement} is not met by {version}: see docs/releasing.md"


def test_what_builds_our_wheel_is_locked_too() -> None:
    build = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["build-system"]["requires"]
    versions = locked("requirements-build.txt")
    for requirement in map(Requirement, build):
        assert versions[canonicalize_name(requirement.name)] in requirement.specifier
    both = versions.keys() & locked("requirements-cpu.txt").keys()
    assert all(versions[name] == locked("requirements-cpu.txt")[name] for name in both)
