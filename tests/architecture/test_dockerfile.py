"""The Dockerfile's stages: each is made of what is there, and those of the GPU image are those of the CPU image.

`scripts/test-image --gpu` builds the target `gpu`, which takes gigabytes. Here it is held to being made as
what is built each time.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
FOUND = ("Dockerfile", "deploy/score/Dockerfile")
TARGETS = {"cpu", "store", "remote", "gpu", "triton"}
PUBLIC = re.compile(r"[a-z0-9./-]+:(?!latest$)[A-Za-z0-9._-]+")

# Name -> its instructions, the first of which is FROM.
Stages = dict[str, list[str]]


def instructions(path: Path) -> Iterator[str]:
    """Each on one line, without comments."""
    text = "".join(line for line in path.read_text().splitlines(keepends=True) if not line.lstrip().startswith("#"))
    for line in text.replace("\\\n", " ").splitlines():
        if line.strip():
            yield " ".join(line.split())


def stages(path: Path) -> Stages:
    found: Stages = {}
    defaults: dict[str, str] = {}
    for written in instructions(path):
        if written.startswith("ARG ") and not found:
            name, _, defaults[name] = written.removeprefix("ARG ").partition("=")
            continue
        line = re.sub(r"\$\{(\w+)\}", lambda named: defaults.get(named[1], named[0]), written)
        if line.startswith("FROM "):
            name = line.partition(" AS ")[2] or "the last one"
            assert name not in found, f"two stages are called {name}"
            found[name] = []
        next(reversed(found.values())).append(line)
    return found


def test_every_target_of_the_manual_is_a_stage() -> None:
    text = (REPOSITORY / "docs" / "releasing.md").read_text()
    assert set(re.findall(r"--target (\w+)", text)) == TARGETS
    assert stages(REPOSITORY / "Dockerfile").keys() >= TARGETS


@pytest.mark.parametrize("name", FOUND)
def test_every_stage_is_made_of_what_is_there(name: str) -> None:
    before: set[str] = {"scratch"}
    for stage, lines in stages(REPOSITORY / name).items():
        base = lines[0].split()[1]
        assert base in before or PUBLIC.fullmatch(base), f"{stage}: {base} is no earlier stage, and has no tag"
        for source, files in copied(lines):
            assert source in before - {"scratch"} or not source, f"{stage} copies from {source}"
            missing = [each for each in files if not source and "$" not in each and not (REPOSITORY / each).exists()]
            assert missing == [], stage
        before.add(stage)


def copied(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The stage that something is copied from, empty for the build's context; and what."""
    for line in lines:
        if line.startswith("COPY "):
            words = line.split()[1:]
            source = next((word.partition("=")[2] for word in words if word.startswith("--from=")), "")
            yield source, [word for word in words[:-1] if not word.startswith("--")]


@pytest.mark.parametrize("kind", ["libraries", "build"])
def test_what_the_gpu_image_installs_is_installed_as_for_the_cpu(kind: str) -> None:
    found = stages(REPOSITORY / "Dockerfile")
    assert [line.replace("gpu", "cpu") for line in found[f"{kind}-gpu"]] == found[f"{kind}-cpu"]


def test_the_gpu_image_is_the_cpu_image_with_other_libraries() -> None:
    found = stages(REPOSITORY / "Dockerfile")
    ours = ("ENV LD_LIBRARY_PATH=", "LABEL ")
    cpu = [line for line in found["cpu"] if not line.startswith(ours)]
    assert [line.replace("gpu", "cpu") for line in found["gpu"] if not line.startswith(ours)] == cpu
    assert cpu


def test_images_name_the_version_of_the_project() -> None:
    version = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    named = set(re.findall(r'image\.version="([^"]*)"', (REPOSITORY / "Dockerfile").read_text()))
    assert named == {version}


def test_a_stage_that_is_missing_is_seen(tmp_path: Path) -> None:
    (tmp_path / "Dockerfile").write_text(
        "FROM debian:12 AS a\n# FROM x AS b\nRUN one \\\n    two\nFROM a\nCOPY --from=c / /\n"
    )
    found = stages(tmp_path / "Dockerfile")
    assert found == {"a": ["FROM debian:12 AS a", "RUN one two"], "the last one": ["FROM a", "COPY --from=c / /"]}
    assert list(copied(found["the last one"])) == [("c", ["/"])]
