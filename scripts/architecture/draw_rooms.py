"""Draws the rooms of the project and who imports whom, from the imports that the code really has, into CONTRIBUTING.md.

    scripts/architecture/draw_rooms.py            writes the drawing
    scripts/architecture/draw_rooms.py --check    fails when the drawing is not the code's; scripts/check runs this

A room is a package directly below one of the four roots; the client and the converters are one room each. An arrow that
follows from others (A -> C where A -> B -> C) is left out, as in any layered drawing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import grimp

ROOTS = ("graphkiln", "graphkiln_client", "graphkiln_converters", "graphkiln_backend")
DIVIDED = ("graphkiln", "graphkiln_backend")
"""Roots that are shown with their rooms."""
_PAGE = Path(__file__).resolve().parents[2] / "CONTRIBUTING.md"
_BEGIN, _END = "<!-- rooms: written by scripts/architecture/draw_rooms.py -->", "<!-- end -->"

Arrows = Mapping[str, set[str]]


def read_arrows() -> dict[str, set[str]]:
    """Room -> rooms that it imports, lazy imports included."""
    graph = grimp.build_graph(*ROOTS, cache_dir=None)
    arrows: dict[str, set[str]] = {}
    for module in sorted(graph.modules):
        importer = room_of(module)
        arrows.setdefault(importer, set())
        for imported in graph.find_modules_directly_imported_by(module):
            arrows[importer].add(room_of(imported))
    return {room: imported - {room} for room, imported in arrows.items()}


def room_of(module: str) -> str:
    """The room of a module: `graphkiln_backend.engines`, `graphkiln_client`, ..."""
    root, _, rest = module.partition(".")
    return f"{root}.{rest.partition('.')[0]}" if root in DIVIDED and rest else root


def reduce_arrows(arrows: Arrows) -> dict[str, set[str]]:
    """The arrows that follow from no others (transitive reduction of a graph without circles)."""
    below = {room: _reachable(arrows, room) for room in arrows}
    return {
        room: {target for target in targets if not any(target in below[other] for other in targets - {target})}
        for room, targets in arrows.items()
    }


def _reachable(arrows: Arrows, room: str) -> set[str]:
    found: set[str] = set()
    waiting = list(arrows[room])
    while waiting:
        target = waiting.pop()
        if target not in found:
            found.add(target)
            waiting += arrows[target]
    return found


def render(arrows: Arrows) -> str:
    """The drawing as a Mermaid flowchart, which a plain reader can follow, too."""
    lines = ["```mermaid", "flowchart TD"]
    for root in ROOTS:
        lines += _boxes(root, sorted(room for room in arrows if room.startswith(f"{root}.")))
    for room, targets in sorted(reduce_arrows(_between_rooms(arrows)).items()):
        if targets:
            lines.append(f"    {_name(room)} --> {' & '.join(sorted(map(_name, targets)))}")
    return "\n".join((*lines, "```"))


def _boxes(root: str, rooms: Sequence[str]) -> list[str]:
    """A box for a root, with its rooms inside."""
    if not rooms:
        return [f"    {root}"]
    return [f"    subgraph {root}", *(f"        {_name(room)}" for room in rooms), "    end"]


def _between_rooms(arrows: Arrows) -> Arrows:
    """Without the roots themselves where they are shown with their rooms."""
    return {room: targets - set(DIVIDED) for room, targets in arrows.items() if room not in DIVIDED}


def _name(room: str) -> str:
    return room.partition(".")[2] or room


def put(page: str, drawing: str) -> str:
    """The page with the drawing between its markers.

    Raises:
        ValueError: The page has no markers.
    """
    before, begin, rest = page.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise ValueError(f"{_PAGE.name} has no place for the drawing: expected the lines '{_BEGIN}' and '{_END}'")
    return f"{before}{_BEGIN}\n{drawing}\n{_END}{after}"


def main() -> int:
    """Write the drawing, or compare it."""
    options = _parse_arguments()
    page = _PAGE.read_text()
    drawn = put(page, render(read_arrows()))
    if not options.check:
        _PAGE.write_text(drawn)
    elif drawn != page:
        print(f"the drawing in {_PAGE.name} is not the code's: run scripts/check --fix", file=sys.stderr)
        return 1
    return 0


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; exit code 1 when it is out of date")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
