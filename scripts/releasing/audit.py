"""Asks PyPI's list of advisories, by pip-audit, for vulnerabilities that are known of what the images install.

    python -m releasing.audit LOCK...

Ends with 1 when there is one, with 2 when nothing could be asked for another reason than the network. Where the list
cannot be reached it says so and ends with 0: pip-audit alone says "no known vulnerabilities" of packages that it did
not find.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_COMMAND = ("-m", "pip_audit", "--require-hashes", "--disable-pip", "--format=json", "--progress-spinner=off")
# What pip-audit's last words hold where the list does not answer, or a mirror answers without one.
_NETWORK = ("requests.exceptions.", "ConnectionError", "ServiceError")


@dataclass(frozen=True)
class Audit:
    """Advisories of the packages of a lock file."""

    vulnerabilities: tuple[str, ...]  # A line for each: package, version, identifier, and the versions without it
    asked: int
    unknown: int  # packages that the list has no page for, among those asked


def read_audit(dependencies: Sequence[Mapping[str, Any]]) -> Audit:
    """Read the field `dependencies` of what pip-audit writes as JSON."""
    lines = [_line(one, found) for one in dependencies for found in one.get("vulns", ())]
    return Audit(tuple(lines), len(dependencies), sum("skip_reason" in one for one in dependencies))


def _line(package: Mapping[str, Any], found: Mapping[str, Any]) -> str:
    fixed = ", ".join(found["fix_versions"]) or "no version"
    return f"{package['name']} {package['version']}: {found['id']}, not in {fixed}"


def report(audit: Audit) -> tuple[int, list[str]]:
    """The exit code, and the lines that say why."""
    if audit.vulnerabilities:
        return 1, [*audit.vulnerabilities, "renew the lock file: docs/releasing.md"]
    if audit.unknown == audit.asked:
        return 0, ["skipped: the index here has no list of advisories, so nothing is known of any package"]
    known = audit.asked - audit.unknown
    return 0, [f"no advisory is known of {known} packages" + f"; {audit.unknown} not found" * bool(audit.unknown)]


def report_failure(words: str) -> tuple[int, list[str]]:
    """The same where pip-audit wrote no result: `words` is its standard error."""
    last = (words.strip().splitlines() or ["pip-audit said nothing"])[-1]
    if any(sign in last for sign in _NETWORK):
        return 0, [f"skipped: the list of advisories cannot be reached: {last[:200]}"]
    return 2, [f"pip-audit failed: {last}"]


def audit_lock(lock: Path) -> tuple[int, list[str]]:
    """Ask for one lock file, which must have hashes: nothing is downloaded or installed."""
    line = (sys.executable, *_COMMAND, "--requirement", str(lock))
    finished = subprocess.run(line, capture_output=True, text=True, check=False)
    if not finished.stdout.strip():
        return report_failure(finished.stderr)
    return report(read_audit(json.loads(finished.stdout)["dependencies"]))


def main(locks: Sequence[str]) -> int:
    """Print what is known of each lock file; the worst exit code."""
    worst = 0
    for lock in locks:
        code, lines = audit_lock(Path(lock))
        worst = max(worst, code)
        sys.stdout.writelines(f"{lock}: {line}\n" for line in lines)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
