"""All pages: commands and options, imports of programs, links, anchors, navigation and pictures."""

from __future__ import annotations

import ast
import io
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import manual
import pictures
import pytest
import yaml
from PIL import Image
from typer.main import get_command

import graphkiln
from documenting import commands
from graphkiln.cli.main import app
from graphkiln_backend.server.installation import find_installation

RUN = {"bash", "python"}
SHOWN = {"text"}
EXTRAS = re.compile(r"graphkiln\[([\w,]+)\]")


@pytest.fixture(scope="module")
def pages(repository: Path) -> list[Path]:
    return manual.pages(repository)


@pytest.fixture(scope="module")
def verbs() -> dict[str, Any]:
    """Name -> command of click's."""
    return dict(commands.commands())


@pytest.fixture(scope="module")
def tritons() -> set[str]:
    """Flags of tritonserver, which `serve` and `doctor` accept, too."""
    return {f"--{name}" for name in find_installation().flags}


def find_verb(words: list[str], verbs: dict[str, Any]) -> tuple[str, list[str]]:
    """Split words into the name of a command, empty if there is none, and its arguments."""
    for count in (2, 1):
        if (name := " ".join(("graphkiln", *words[:count]))) in verbs:
            return name, words[count:]
    return "", words


def options_of(name: str, verbs: dict[str, Any], tritons: set[str]) -> set[str]:
    own = {spelled for param in commands.parameters(verbs[name]) for spelled in (*param.opts, *param.secondary_opts)}
    return {*own, "--help"} | (tritons if name in ("graphkiln serve", "graphkiln doctor") else set())


def unknown(words: list[str], verbs: dict[str, Any], tritons: set[str]) -> Iterator[str]:
    """Yield words of a command that do not exist."""
    if words[0].startswith("--"):
        known = {name for param in get_command(app).params for name in param.opts}
        yield from {words[0]} - known - {"--help"}
        return
    name, rest = find_verb(words, verbs)
    if not name and words[0] not in get_command(app).commands:  # type: ignore[attr-defined]
        yield words[0]
    named = {option for word in rest if word.startswith("--") for option in re.findall(r"^--[a-z][a-z0-9-]*", word)}
    yield from named - (options_of(name, verbs, tritons) if name else {"--help"})


def test_commands_in_blocks_are_valid(pages: list[Path], verbs: dict[str, Any], tritons: set[str]) -> None:
    found = [each for page in pages for each in manual.graphkiln_commands(page)]
    assert len(found) > 80
    assert [fault for place, words in found for fault in faults(place, words, verbs, tritons)] == []


def faults(place: str, words: list[str], verbs: dict[str, Any], tritons: set[str]) -> Iterator[str]:
    """Yield options that do not exist, or the error of the parser."""
    missing = list(unknown(words, verbs, tritons))
    yield from (f"{place}: {each}" for each in missing)
    name, rest = find_verb(words, verbs)
    if name and not missing and not {"...", "[OPTIONS]"} & set(rest):
        try:
            verbs[name].make_context(name, list(rest), resilient_parsing=False).close()
        except Exception as error:
            yield f"{place}: graphkiln {' '.join(words)}: {error}"


def test_options_named_in_the_text_exist(pages: list[Path], verbs: dict[str, Any], tritons: set[str]) -> None:
    found = [(page.name, words) for page in pages for words in manual.mentioned_commands(page)]
    assert len(found) > 60
    assert [f"{name}: {each}" for name, words in found for each in unknown(words, verbs, tritons)] == []


@pytest.mark.parametrize(
    ("command", "fault"),
    [("serve --modelstore x", "--modelstore"), ("sreve x", "sreve"), ("cache lits", "lits"), ("tune m --p99 x", "")],
)
def test_invalid_commands_are_found(command: str, fault: str, verbs: dict[str, Any], tritons: set[str]) -> None:
    found = list(faults("here", command.split(), verbs, tritons))
    assert bool(found) == bool(fault) or command.startswith("cache")
    assert all(fault in each for each in found)


def test_programs_compile_and_import_existing_names(pages: list[Path]) -> None:
    programs = [block for page in pages for block in manual.blocks(page) if block.language == "python"]
    assert len(programs) > 15
    assert [fault for block in programs for fault in missing_imports(block)] == []


def missing_imports(block: manual.Block) -> Iterator[str]:
    """Yield names of graphkiln that a program imports and that do not exist."""
    for node in ast.walk(compile(block.text, block.place, "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("graphkiln"):
            module = import_module(node.module or "")
            yield from (f"{block.place}: {alias.name}" for alias in node.names if not hasattr(module, alias.name))
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("graphkiln"):
                    import_module(alias.name)


def test_links_and_anchors_exist(pages: list[Path]) -> None:
    found = [(page, target) for page in pages for target in manual.links(page)]
    assert len(found) > 150
    assert [f"{page.name}: {target}" for page, target in found if not target_exists(page, target)] == []


def target_exists(page: Path, target: str) -> bool:
    if re.match(r"[a-z][a-z0-9+.-]*:", target):
        return not target.startswith(("http://localhost", "file:"))
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return False
    return not anchor or (file.suffix == ".md" and anchor in manual.anchors(file))


def test_broken_links_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# A `b` c\n\n[x](#a-b-c) [y](#a) ![z](none.png)\n\n```text\n[n](nowhere.md)\n```\n")
    assert [target_exists(page, target) for target in manual.links(page)] == [True, False, False]


def test_blocks_of_guides_are_run_or_text(repository: Path) -> None:
    guides = [repository / "docs" / "tutorial.md", *(repository / "docs" / "how-to").glob("*.md")]
    kinds = {(block.language, block.place) for page in guides for block in manual.blocks(page) if not block.title}
    assert [place for language, place in kinds if language not in RUN | SHOWN] == []


def test_pages_with_programs_are_executed(repository: Path) -> None:
    """test_walkthroughs runs them against a real server; other blocks are text."""
    docs = repository / "docs"
    programs = {
        str(block.page.relative_to(docs))
        for page in docs.rglob("*.md")
        for block in manual.blocks(page)
        if block.language in RUN
    }
    assert programs == {"tutorial.md", *(f"{name}.md" for name in manual.GUIDES)}


def test_public_names_are_in_the_reference(repository: Path) -> None:
    page = (repository / "docs" / "reference" / "python.md").read_text()
    described = {name.rpartition(".")[2] for name in re.findall(r"^::: (\S+)$", page, re.MULTILINE)}
    assert {*graphkiln.__all__} - {"scoring"} - described == set()
    assert {*graphkiln.scoring.__all__} - described == set()


def test_pages_are_in_the_navigation(repository: Path) -> None:
    site = yaml.safe_load((repository / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", str(site["nav"])))
    docs = repository / "docs"
    assert listed == {str(path.relative_to(docs)) for path in docs.rglob("*.md")}


def test_named_extras_exist(repository: Path, pages: list[Path]) -> None:
    extras = set(tomllib.loads((repository / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    named = [
        (page.name, each) for page in pages for found in EXTRAS.findall(page.read_text()) for each in found.split(",")
    ]
    assert len(named) > 8
    assert [(page, each) for page, each in named if each not in extras] == []


@pytest.mark.parametrize("name", pictures.PICTURES)
def test_pictures_are_current(name: str, repository: Path) -> None:
    """tests/integration/test_pictures.py makes them, and saves them with `GRAPHKILN_RECORD=1`."""
    assert pictures.fault_of(repository / "docs" / name) == ""


def test_pictures_are_made_by_a_test_or_script(pages: list[Path]) -> None:
    """docs/quickstart.svg is drawn by `scripts/docs --picture`."""
    shown = {target.rpartition("/")[2] for page in pages for target in manual.pictures(page)}
    assert shown == {*pictures.PICTURES, "quickstart.svg"}


def test_old_empty_and_large_pictures_are_found(tmp_path: Path) -> None:
    drawn = Image.effect_noise((700, 100), 90)
    content = io.BytesIO()
    drawn.save(content, "PNG")
    pictures.keep("page.png", content.getvalue(), tmp_path)
    kept = tmp_path / "page.png"
    assert pictures.fault_of(kept) == ""
    drawn.save(kept, "PNG")
    assert "no more" in pictures.fault_of(kept)
    Image.new("RGB", (700, 100)).save(kept, "PNG")
    assert "shows nothing" in pictures.fault_of(kept)
    kept.write_bytes(bytes(pictures.MOST_BYTES + 1))
    assert "bytes" in pictures.fault_of(kept)
    assert "missing" in pictures.fault_of(tmp_path / "none.png")
