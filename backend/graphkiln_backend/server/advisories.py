"""Known vulnerabilities of the installed Triton, and which of them clients can reach.

Package scanners do not detect the server inside the wheel. `advisories.toml` has the table with its date and source.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphkiln_backend.server.flags import TritonFlags
from graphkiln_backend.server.installation import Installation

CURRENT = "the image target `triton` has NVIDIA's current Triton: docker build --target triton, see SECURITY.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class Advisory:
    """A row of the table.

    Attributes:
        ids: Vulnerabilities, such as `CVE-2025-23310`.
        bulletin: Number of NVIDIA's bulletin.
        fixed: Release with the fix, such as `25.07`.
        reach: Who can exploit them: `request`, `http`, `grpc`, `admin` or `absent`; see the table.
        about: Short description.
    """

    ids: Sequence[str]
    bulletin: int
    fixed: str
    reach: str
    about: str

    def is_reachable(self, flags: TritonFlags, *, has_key: bool) -> bool:
        """True if clients without the admin key can exploit them on a server with these flags."""
        if self.reach == "admin":
            return not has_key
        return self.reach == "request" or (self.reach in {"http", "grpc"} and flags.is_on(self.reach))


@dataclass(frozen=True, kw_only=True, slots=True)
class Assessment:
    """The vulnerabilities of a server.

    Attributes:
        date: Date of the table.
        known: Vulnerabilities of its release, or of the oldest release if it is unknown.
        reachable: Those that clients can reach.
    """

    date: str
    known: Sequence[Advisory]
    reachable: Sequence[Advisory]

    def __str__(self) -> str:
        known, reachable = (sum(len(row.ids) for row in rows) for rows in (self.known, self.reachable))
        if not known:
            return f"no vulnerability is known that a later release repaired (table of {self.date})"
        newest = max(row.fixed for row in self.known)
        return (
            f"{known} known vulnerabilities, {reachable} of them within reach of clients, are repaired in {newest} "
            f"(table of {self.date})"
        )


def assess(installation: Installation, flags: TritonFlags, *, has_key: bool) -> Assessment:
    """Look up the vulnerabilities of a server with these flags, and with or without an admin key."""
    table = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    rows = [Advisory(**row) for row in table["advisory"]]
    known = [row for row in rows if installation.features.release < row.fixed]
    reachable = [row for row in known if row.is_reachable(flags, has_key=has_key)]
    return Assessment(date=str(table["date"]), known=known, reachable=reachable)
