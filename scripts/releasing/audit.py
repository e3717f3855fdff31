"""Check what the images install for known vulnerabilities, by pip-audit and PyPI's advisories.

    python -m releasing.audit LOCK...

The exit code is 1 for a vulnerability, 2 if pip-audit fails. If the advisories cannot be reached, a line says so, and
the exit code is 0: pip-audit alone reports "no known vulnerabilities" for packages that it did not find.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_COMMAND = ("-m", "pip_audit", "--require-hashes", "--disable-pip", "--format=json", "--progress-spinner=off")
# In pip-audit's last line if PyPI cannot be reached, or a mirror has no advisories.
_NETWORK = ("requests.exceptions.", "ConnectionError", "ServiceError")


def report(dependencies: Sequence[Mapping[str, Any]]) -> tuple[int, list[str]]:
    """Make the exit code and lines of a report from the field `dependencies` of pip-audit's JSON."""
    vulnerabilities = [
        f"{package['name']} {package['version']}: {found['id']}, "
        f"not in {', '.join(found['fix_versions']) or 'no version'}"
        for package in dependencies
        for found in package.get("vulns", ())
    ]
    if vulnerabilities:
        return 1, [*vulnerabilities, "renew the lock file: docs/releasing.md"]
    unknown = sum("skip_reason" in package for package in dependencies)
    if unknown == len(dependencies):
        return 0, ["skipped: the package index has no advisories"]
    return 0, [
        f"no advisory is known of {len(dependencies) - unknown} packages" + f"; {unknown} not found" * bool(unknown)
    ]


def report_failure(errors: str) -> tuple[int, list[str]]:
    """Make the exit code and lines of a report from the standard error of a failed pip-audit."""
    last = (errors.strip().splitlines() or ["pip-audit printed nothing"])[-1]
    if any(sign in last for sign in _NETWORK):
        return 0, [f"skipped: the list of advisories cannot be reached: {last[:200]}"]
    return 2, [f"pip-audit failed: {last}"]


def audit_lock(lock: Path) -> tuple[int, list[str]]:
    """Check one lock file, which must have hashes: nothing is downloaded or installed."""
    line = (sys.executable, *_COMMAND, "--requirement", str(lock))
    finished = subprocess.run(line, capture_output=True, text=True, check=False)
    if not finished.stdout.strip():
        return report_failure(finished.stderr)
    return report(json.loads(finished.stdout)["dependencies"])


def main(locks: Sequence[str]) -> int:
    """Print the report of each lock file; return the worst exit code."""
    worst = 0
    for lock in locks:
        code, lines = audit_lock(Path(lock))
        worst = max(worst, code)
        sys.stdout.writelines(f"{lock}: {line}\n" for line in lines)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
