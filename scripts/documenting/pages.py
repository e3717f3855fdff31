"""Generated pages of the documentation and their renderers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from documenting import commands, journeys, reference

REPOSITORY = Path(__file__).resolve().parents[2]
DOCS = REPOSITORY / "docs"

# Renderers by path below `docs`.
PAGES: Mapping[str, Callable[[], str]] = {
    "reference/cli.md": commands.render,
    "reference/settings.md": reference.render_settings,
    "reference/manifest.md": reference.render_manifest,
    "reference/manifest.schema.json": reference.render_schema,
    "reference/errors.md": reference.render_errors,
    "reference/policy.md": reference.render_policy,
    "metrics.md": reference.render_metrics,
    "journeys.md": lambda: journeys.render(DOCS / "journeys.json"),
}


def write(docs: Path = DOCS) -> list[str]:
    """Write pages that are out of date; return their paths below `docs`."""
    found = stale(docs)
    for name in found:
        (docs / name).parent.mkdir(parents=True, exist_ok=True)
        (docs / name).write_text(PAGES[name]())
    return found


def stale(docs: Path = DOCS) -> list[str]:
    """Paths below `docs` of pages that are missing or out of date."""
    return [
        name for name, render in PAGES.items() if not (docs / name).is_file() or (docs / name).read_text() != render()
    ]
