"""Asks pip for the licences of what the lock files of the images name, and holds them to lists that somebody has read.

    python -m releasing.licences [cpu|remote|gpu|triton|score]...

pip reads the metadata of the very releases that are locked, and installs nothing; where the index has no metadata,
it downloads them, which are gigabytes for the GPU. Ends with 1 where a licence is on no list, or a list names one that
is gone, and with 2 where pip fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
_COMMAND = ("-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--require-hashes", "--quiet")
_COMMAND_END = ("--disable-pip-version-check", "--only-binary", ":all:", "--report", "-", "--requirement")
_CLASSIFIER = "License :: "


@dataclass(frozen=True)
class Image:
    """An image and what is known of its licences.

    Attributes:
        lock: What it installs.
        read: Licences that somebody has read, a line for each. Those of the CPU's image are allowed in every image.
    """

    lock: Path
    read: Path


IMAGES = {
    "cpu": Image(DEPLOY / "image" / "requirements-cpu.txt", DEPLOY / "image" / "licences.txt"),
    "remote": Image(DEPLOY / "image" / "requirements-remote.txt", DEPLOY / "image" / "licences-remote.txt"),
    "gpu": Image(DEPLOY / "image" / "requirements-gpu.txt", DEPLOY / "image" / "licences-gpu.txt"),
    "triton": Image(DEPLOY / "image" / "requirements-triton.txt", DEPLOY / "image" / "licences-triton.txt"),
    "score": Image(DEPLOY / "score" / "requirements.txt", DEPLOY / "score" / "licences.txt"),
}


def licence_of(metadata: Mapping[str, Any]) -> str:
    """Licence in the metadata of a package: an SPDX expression, else classifiers, else the first line of a text.

    Args:
        metadata: As pip reports it. Source: PyPA, "Core metadata specifications", as JSON.
    """
    told = [each for each in metadata.get("classifier", ()) if each.startswith(_CLASSIFIER)]
    kinds = "; ".join(sorted(each.rpartition(" :: ")[2] for each in told))
    return str(metadata.get("license_expression") or kinds or metadata.get("license", "").strip().partition("\n")[0])


def read_report(report: Mapping[str, Any]) -> dict[str, str]:
    """Package and version -> licence, of what pip would install. Source: pip, "Installation report"."""
    found = (each["metadata"] for each in report["install"])
    return {f"{each['name']} {each['version']}": licence_of(each) for each in found}


def judge(licences: Mapping[str, str], everywhere: Iterable[str], own: Iterable[str]) -> tuple[int, list[str]]:
    """The exit code, and a line for each licence or fault.

    Args:
        licences: Package -> licence.
        everywhere: Licences that are allowed in every image.
        own: Those that are allowed in this one, too, and must be in it.
    """
    packages: dict[str, list[str]] = defaultdict(list)
    for package, licence in sorted(licences.items()):
        packages[licence].append(package)
    unknown = packages.keys() - set(everywhere) - set(own)
    gone = set(own) - packages.keys()
    lines = [f"{licence or 'says nothing'}: {', '.join(each)}" for licence, each in sorted(packages.items())]
    faults = [f"on no list, read it first: {licence or 'a package that names none'}" for licence in sorted(unknown)]
    faults += [f"on the list, and no package has it any more: {licence}" for licence in sorted(gone)]
    return int(bool(faults)), [*lines, *faults]


def ask_pip(lock: Path) -> dict[str, Any]:
    """Packages that pip would install.

    Raises:
        CalledProcessError: It fails: a release is gone, another file than was locked, or there is no network.
    """
    line = (sys.executable, *_COMMAND, *_COMMAND_END, str(lock))
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def examine(name: str) -> tuple[int, list[str]]:
    """The same for an image."""
    image, cpu = IMAGES[name], IMAGES["cpu"]
    try:
        licences = read_report(ask_pip(image.lock))
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it said nothing"])[-1]
        return 2, [f"pip failed: {last}"]
    return judge(licences, cpu.read.read_text().splitlines(), image.read.read_text().splitlines())


def main(names: Sequence[str]) -> int:
    """Print the licences of some images, or of all; the worst exit code."""
    unknown = [name for name in names if name not in IMAGES]
    if unknown:
        sys.exit(f"graphkiln: there is no image '{unknown[0]}': {', '.join(IMAGES)}")
    worst = 0
    for name in names or IMAGES:
        code, lines = examine(name)
        worst = max(worst, code)
        sys.stdout.writelines(f"{name}: {line}\n" for line in lines)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
