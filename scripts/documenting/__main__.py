"""Write the documentation's generated pages and build the site.

scripts/docs              write docs/reference and docs/journeys.md from code and recorded runs, build the site in site/
scripts/docs --write      only write the pages
scripts/docs --check      write nothing; fail if a page is out of date or the site does not build in strict mode
scripts/docs --picture    run scripts/quickstart and draw its terminal: docs/quickstart.svg
scripts/docs --links      list the addresses of other sites in the pages
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from documenting import pages, site
from documenting.pages import REPOSITORY


def main() -> None:
    """Run the command line."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="scripts/docs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--links", action="store_true")
    options = parser.parse_args()
    if options.picture:
        site.record(REPOSITORY)
    elif options.check:
        _check()
    elif options.links:
        print(*(f"{page}: {address}" for page, address in site.outside_links(REPOSITORY)), sep="\n")
    else:
        print(*pages.write(), sep="\n")
        if not options.write:
            _build(REPOSITORY / "site")


def _check() -> None:
    faulty = [
        f"{page}: {address}: {fault}"
        for page, address in site.outside_links(REPOSITORY)
        if (fault := site.fault_of(address))
    ]
    if faulty:
        sys.exit(f"graphkiln: addresses of other sites: {'; '.join(faulty)}")
    if stale := pages.stale():
        sys.exit(f"graphkiln: pages out of date, run scripts/docs: {', '.join(stale)}")
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder))


def _build(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(folder)]
    # Suppress an advertisement of the theme.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    if built.returncode:
        sys.exit("graphkiln: the site does not build; see the links, anchors or navigation above")
    if foreign := site.foreign_resources(folder):
        sys.exit(f"graphkiln: the site fetches resources of other sites: {'; '.join(foreign[:5])}")


main()
