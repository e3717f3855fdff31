"""Links out of the documentation, where there is no checkout."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from documenting.site import foreign_resources, on_config, without_outside_links


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
def test_only_what_the_site_lacks_becomes_text(source: str, link: str, shown: str) -> None:
    assert without_outside_links(f"see {link}.", source) == f"see {shown}."


def test_what_a_site_fetches_from_others_is_found(tmp_path: Path) -> None:
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
