"""Links of the site, resources of other sites, and the picture of the quickstart."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest

from documenting.site import (
    draw,
    fault_of,
    foreign_resources,
    on_config,
    outside_links,
    shown_lines,
    without_outside_links,
)


@pytest.mark.parametrize(
    ("source", "link", "shown"),
    [
        ("a.md", "[rules](../deploy/rules.yml)", "rules (`deploy/rules.yml`)"),
        ("how-to/a.md", "[SECURITY.md](../../SECURITY.md)", "SECURITY.md"),
        ("how-to/a.md", "[page](../page.md#x)", "[page](../page.md#x)"),
        ("a.md", "[`b.yaml`](../deploy/b.yaml)", "`b.yaml` (`deploy/b.yaml`)"),
        ("a.md", "[other](b.md)", "[other](b.md)"),
        ("a.md", "[there](https://example.org/../x)", "[there](https://example.org/../x)"),
        ("reference/a.md", "![picture](../quickstart.svg)", "![picture](../quickstart.svg)"),
    ],
)
def test_links_out_of_docs_become_text(source: str, link: str, shown: str) -> None:
    assert without_outside_links(f"see {link}.", source) == f"see {shown}."


def test_resources_of_other_sites_are_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text(
        '<link rel="stylesheet" href="own.css"><script src="https://cdn.example/x.js"></script>'
        '<img src="//cdn.example/p">'
        '<link rel="canonical" href="https://docs.example/a.html">'
        '<a href="https://example.org">read</a><iframe src="https://example.org/f"></iframe><img src="p.png">'
    )
    (tmp_path / "own.css").write_text(
        '@import "https://fonts.example/f.css"; a { background: url(p.png) } b { background: url( //x.example/q) }'
    )
    assert foreign_resources(tmp_path) == [
        "a.html: https://cdn.example/x.js",
        "a.html: //cdn.example/p",
        "a.html: https://example.org/f",
        "own.css: https://fonts.example/f.css",
        "own.css: //x.example/q",
    ]


@pytest.mark.parametrize("address", ["https://docs.example/graphkiln", "https://docs.example/graphkiln/"])
def test_the_site_may_be_below_a_path(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SITE_URL", raising=False)
    config = SimpleNamespace(site_url=None)
    assert on_config(config).site_url is None
    monkeypatch.setenv("SITE_URL", address)
    assert on_config(config).site_url == "https://docs.example/graphkiln/"


# Addresses of other sites in the pages.


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("https://in-toto.io", ""),
        ("https://github.com/a/b", ""),
        ("https://github.com/a/b/blob/v1.2/main/x.md", ""),
        ("http://in-toto.io", "not https"),
        ("https://me:pass@in-toto.io", "password"),
        ("https://github.com/a/b/blob/main/README.md", "moves"),
        ("https://github.com/a/b/tree/master", "moves"),
        ("https://raw.githubusercontent.com/a/b/main/x", "moves"),
    ],
)
def test_faults(address: str, fault: str) -> None:
    found = fault_of(address)
    assert fault in found
    assert bool(fault) == bool(found)


def test_addresses_of_the_pages_have_no_faults(repository: Path) -> None:
    found = outside_links(repository)
    assert ("docs/releasing.md", "https://docs.astral.sh/uv/") in found
    assert [(page, address) for page, address in found if fault_of(address)] == []


# A terminal as a picture.

PRINTED = (
    "$ ./quickstart\nE0101 CudaDriverHelper has not been initialized.\n\x1b[1mseven\x1b[0m  \x1b[32m0.99\x1b[0m\n\n"
)


def test_the_picture_is_self_contained() -> None:
    picture = draw(PRINTED, title="graphkiln")
    root = ElementTree.fromstring(picture)  # noqa: S314 - our own
    assert root.tag.endswith("svg")
    assert "url(http" not in picture
    assert "@font-face" not in picture
    text = "".join(root.itertext()).replace("\xa0", " ")
    assert "seven" in text
    assert "font-weight: bold" in picture


def test_lines_of_this_machine_are_left_out() -> None:
    assert shown_lines(PRINTED) == ["$ ./quickstart", "\x1b[1mseven\x1b[0m  \x1b[32m0.99\x1b[0m"]
