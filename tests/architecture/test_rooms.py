"""The drawing of the rooms: arrows that follow from others are left out, and the page holds what the code says."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def draw_rooms(repository: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "draw_rooms", repository / "scripts" / "architecture" / "draw_rooms.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("module", "room"),
    [
        ("graphkiln_backend.engines.onnxruntime.session", "graphkiln_backend.engines"),
        ("graphkiln_backend.graph", "graphkiln_backend.graph"),
        ("graphkiln_client.transports.http_wire", "graphkiln_client"),
        ("graphkiln", "graphkiln"),
    ],
)
def test_a_module_stands_in_a_room(draw_rooms: ModuleType, module: str, room: str) -> None:
    assert draw_rooms.room_of(module) == room


def test_arrows_that_follow_from_others_are_left_out(draw_rooms: ModuleType) -> None:
    arrows = {"a": {"b", "c", "d"}, "b": {"c"}, "c": {"d"}, "d": set()}
    assert draw_rooms.reduce_arrows(arrows) == {"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": set()}


def test_the_drawing_stands_between_its_markers(draw_rooms: ModuleType) -> None:
    page = f"before\n{draw_rooms._BEGIN}\nold\n{draw_rooms._END}\nafter\n"
    drawn = draw_rooms.put(page, "new")
    assert drawn == page.replace("old", "new")
    with pytest.raises(ValueError, match="no place for the drawing"):
        draw_rooms.put("nothing", "new")


def test_an_import_that_is_not_drawn_is_seen(draw_rooms: ModuleType, repository: Path) -> None:
    arrows = {room: set(targets) for room, targets in draw_rooms.read_arrows().items()}
    page = (repository / "CONTRIBUTING.md").read_text()
    assert draw_rooms.put(page, draw_rooms.render(arrows)) == page
    arrows["graphkiln_backend.images"].add("graphkiln_backend.proof")
    assert draw_rooms.put(page, draw_rooms.render(arrows)) != page


def test_an_editor_finds_every_package_of_ours(repository: Path) -> None:
    """pyrightconfig.json suffices to resolve the imports of a fresh checkout without any installation."""
    paths = json.loads((repository / "pyrightconfig.json").read_text())["extraPaths"]
    program = (
        "import sys, importlib.machinery as m; names, paths = sys.argv[1].split(), sys.argv[2:]; "
        "print(*[name for name in names if m.PathFinder.find_spec(name, paths) is None])"
    )
    names = "graphkiln graphkiln_client graphkiln_converters graphkiln_backend running zoo reporting"
    missing = subprocess.run(
        [sys.executable, "-S", "-c", program, names, *(str(repository / path) for path in paths)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert missing.stdout.split() == []
