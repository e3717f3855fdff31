"""Links of the README where no repository is around it."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from releasing.index_readme import main, with_absolute_links

ADDRESS = "https://example.org/someone/graphkiln"


@pytest.mark.parametrize(
    ("link", "absolute"),
    [
        ("[page](docs/page.md#safety)", f"[page]({ADDRESS}/blob/v1/docs/page.md#safety)"),
        ("![a [b]](docs/a.svg)", f"![a [b]]({ADDRESS}/raw/v1/docs/a.svg)"),
        ("[`code`](SECURITY.md)", f"[`code`]({ADDRESS}/blob/v1/SECURITY.md)"),
        ("[there](https://example.org/x)", "[there](https://example.org/x)"),
        ("[below](#try-it)", "[below](#try-it)"),
        ("text (not a link)", "text (not a link)"),
    ],
)
def test_relative_links_become_absolute(link: str, absolute: str) -> None:
    assert with_absolute_links(link, f"{ADDRESS}/", "v1") == absolute


def test_no_link_of_the_readme_stays_relative(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["index_readme", ADDRESS, "v1"])
    main()
    printed = capsys.readouterr().out
    targets = re.findall(r"\]\(([^)]+)\)", printed)
    assert len(targets) == len(re.findall(r"\]\(([^)]+)\)", (repository / "README.md").read_text())) > 20
    assert [target for target in targets if not target.startswith("https://")] == []


def test_without_an_address_it_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["index_readme"])
    with pytest.raises(SystemExit, match="ADDRESS TAG"):
        main()
