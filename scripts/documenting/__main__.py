"""Writes the documentation's generated pages and builds the site.

scripts/docs              writes docs/reference and docs/journeys.md from the code and what was measured, builds
                          the site in site/
scripts/docs --write      writes the pages alone
scripts/docs --check      writes nothing: fails where a page is not what the code says, or the site does not build
                          strictly
scripts/docs --picture    runs scripts/quickstart and draws its terminal: docs/quickstart.svg
scripts/docs --links      lists the addresses of other sites in the pages, to be tried where there is a network
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
    """Do what the command line says."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="scripts/docs", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--picture", action="store_true")
    parser.add_argument("--links", action="store_true")
    given = parser.parse_args()
    if given.picture:
        site.record(REPOSITORY)
    elif given.check:
        _check()
    elif given.links:
        print(*(f"{page}: {address}" for page, address in site.outside_links(REPOSITORY)), sep="\n")
    else:
        print(*pages.write(), sep="\n")
        if not given.write:
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
        sys.exit(f"graphkiln: not what the code says (scripts/docs writes them): {', '.join(stale)}")
    with tempfile.TemporaryDirectory() as folder:
        _build(Path(folder))


def _build(folder: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--clean", "--site-dir", str(folder)]
    # of the theme: an advertisement
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=REPOSITORY, env=environment, check=False)
    if built.returncode:
        sys.exit("graphkiln: the site does not build: its links, anchors or navigation are wrong: see above")
    if foreign := site.foreign_resources(folder):
        sys.exit(f"graphkiln: the site fetches from others: {'; '.join(foreign[:5])}")


main()
