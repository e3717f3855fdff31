"""Links out of the documentation, where there is no checkout."""

from __future__ import annotations

import pytest

from documenting.site import without_outside_links


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
