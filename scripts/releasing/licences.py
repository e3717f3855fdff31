"""Compare the licences of the packages in the images' lock files with lists of reviewed licences.

    python -m releasing.licences [cpu|remote|gpu|triton|score]...

pip reads the metadata of the locked releases and installs nothing; if the index has no metadata, it downloads the
packages: gigabytes for the GPU. The exit code is 1 if a licence is on no list, or a list has one that no package has
any more, and 2 if pip fails.
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
# Packages whose metadata names no licence -> the licence in their files.
_IN_THEIR_FILES = {"sigstore-models": "MIT"}


@dataclass(frozen=True)
class Image:
    """Lock file and reviewed licences of an image.

    Attributes:
        lock: Lock file of its packages.
        read: Reviewed licences, a line for each. Those of the CPU's image are allowed in every image.
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
        metadata: Metadata as pip reports it. Source: PyPA, "Core metadata specifications", as JSON.
    """
    classifiers = [each for each in metadata.get("classifier", ()) if each.startswith(_CLASSIFIER)]
    kinds = "; ".join(sorted(each.rpartition(" :: ")[2] for each in classifiers))
    text = metadata.get("license", "").strip().partition("\n")[0]
    return str(metadata.get("license_expression") or kinds or text or _IN_THEIR_FILES.get(metadata.get("name", ""), ""))


def read_report(report: Mapping[str, Any]) -> dict[str, str]:
    """Licences of what pip would install, by package and version. Source: pip, "Installation report"."""
    found = (each["metadata"] for each in report["install"])
    return {f"{each['name']} {each['version']}": licence_of(each) for each in found}


def judge(licences: Mapping[str, str], everywhere: Iterable[str], own: Iterable[str]) -> tuple[int, list[str]]:
    """Compare licences with the lists.

    Args:
        licences: Licence by package.
        everywhere: Licences allowed in every image.
        own: Further licences allowed in this image; each must be in use.

    Returns:
        The exit code, and a line for each licence and fault.
    """
    packages: dict[str, list[str]] = defaultdict(list)
    for package, licence in sorted(licences.items()):
        packages[licence].append(package)
    unknown = packages.keys() - set(everywhere) - set(own)
    gone = set(own) - packages.keys()
    lines = [f"{licence or 'no licence'}: {', '.join(each)}" for licence, each in sorted(packages.items())]
    faults = [f"on no list, read it first: {licence or 'a package without a licence'}" for licence in sorted(unknown)]
    faults += [f"on the list, but of no package any more: {licence}" for licence in sorted(gone)]
    return int(bool(faults)), [*lines, *faults]


def ask_pip(lock: Path) -> dict[str, Any]:
    """Run pip; return its report of the packages that it would install.

    Raises:
        CalledProcessError: A release is gone, a file is not the locked one, or there is no network.
    """
    line = (sys.executable, *_COMMAND, *_COMMAND_END, str(lock))
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def examine(name: str) -> tuple[int, list[str]]:
    """Compare the licences of an image; return the exit code and lines."""
    image, cpu = IMAGES[name], IMAGES["cpu"]
    try:
        licences = read_report(ask_pip(image.lock))
    except subprocess.CalledProcessError as error:
        last = (error.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        return 2, [f"pip failed: {last}"]
    return judge(licences, cpu.read.read_text().splitlines(), image.read.read_text().splitlines())


def main(names: Sequence[str]) -> int:
    """Print the licences of some images, or of all; return the worst exit code."""
    unknown = [name for name in names if name not in IMAGES]
    if unknown:
        sys.exit(f"graphkiln: there is no image '{unknown[0]}'; expected one of {', '.join(IMAGES)}")
    worst = 0
    for name in names or IMAGES:
        code, lines = examine(name)
        worst = max(worst, code)
        sys.stdout.writelines(f"{name}: {line}\n" for line in lines)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
