"""A terminal as a picture."""

from __future__ import annotations

from xml.etree import ElementTree

from documenting.terminal import draw, shown_lines

PRINTED = (
    "$ ./quickstart\nE0101 CudaDriverHelper has not been initialized.\n\x1b[1mseven\x1b[0m  \x1b[32m0.99\x1b[0m\n\n"
)


def test_the_picture_needs_nothing_from_elsewhere() -> None:
    picture = draw(PRINTED, title="graphkiln")
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own
    assert root.tag.endswith("svg")
    assert "url(http" not in picture
    assert "@font-face" not in picture
    text = "".join(root.itertext()).replace("\xa0", " ")
    assert "seven" in text
    assert "font-weight: bold" in picture


def test_what_only_this_machine_says_is_left_out() -> None:
    assert shown_lines(PRINTED) == ["$ ./quickstart", "\x1b[1mseven\x1b[0m  \x1b[32m0.99\x1b[0m"]
