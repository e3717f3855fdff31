"""Build a release from the last commit: the wheel and the source distribution, checked and installed.

    scripts/release https://HOST/OWNER/graphkiln    writes dist/ with SHA256SUMS

Both are built twice from the committed files, with the time of the commit, and must have the same bytes. They are
checked by twine, and the wheel is installed from its file into an empty environment of each supported Python that is
on the PATH. Nothing is uploaded.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory

REPOSITORY = Path(__file__).resolve().parents[2]
PYTHONS = ("python3.11", "python3.12", "python3.13")
# Files that name the version beside pyproject.toml, with the line that does.
_NAMED_IN = {
    "Dockerfile": r'org\.opencontainers\.image\.version="(.+)"',
    "deploy/helm/graphkiln/Chart.yaml": r"(?:version|appVersion): (.+)",
    "deploy/kubernetes/base/kustomization.yaml": r"newTag: (.+)",
    "deploy/kserve/kustomization.yaml": r"newTag: (.+)",
}
_DATED = r"^## {version} \(\d{{4}}-\d\d-\d\d\)$"
_LINK = re.compile(r"(?P<picture>!?)(?P<text>\[(?:[^\[\]]|\[[^\[\]]*\])*\])\((?P<target>[^()\s]+)\)")
_ABSOLUTE = re.compile(r"[a-z][a-z0-9+.-]*:|#")
# A first use of the base install: a request to a server that is not there.
_FIRST_USE = """
import graphkiln
try:
    graphkiln.Client("http://127.0.0.1:9", timeout_s=1, max_retries=0).ready()
except graphkiln.ClientError as error:
    print(type(error).__name__)
"""


class ReleaseError(Exception):
    """A release that cannot be built, with what to do."""


def check_versions(tree: Path) -> str:
    """Return the version of a tree, which all of its files must name.

    Raises:
        ReleaseError: Files name different versions, or the changelog has no date for it.
    """
    version: str = tomllib.loads((tree / "pyproject.toml").read_text())["project"]["version"]
    for file, pattern in _NAMED_IN.items():
        found = set(re.findall(pattern, (tree / file).read_text()))
        if found != {version}:
            raise ReleaseError(f"{file} names {', '.join(sorted(found)) or 'no version'}, pyproject.toml {version}")
    if not re.search(_DATED.format(version=re.escape(version)), (tree / "CHANGELOG.md").read_text(), re.MULTILINE):
        raise ReleaseError(f"CHANGELOG.md has no dated section: write '## {version} (YYYY-MM-DD)'")
    return version


def with_absolute_links(text: str, address: str, tag: str) -> str:
    """Make the links of a page at the root of the repository absolute.

    Args:
        text: The page, in Markdown.
        address: Address of the repository in a browser; pages are below `blob/TAG`, files below `raw/TAG`.
        tag: Tag of the release.
    """

    def replace(found: re.Match[str]) -> str:
        if _ABSOLUTE.match(found["target"]):
            return found[0]
        kind = "raw" if found["picture"] else "blob"
        return f"{found['picture']}{found['text']}({address.rstrip('/')}/{kind}/{tag}/{found['target']})"

    return _LINK.sub(replace, text)


def build(archive: bytes, address: str, folder: Path, commit_time: str) -> dict[str, str]:
    """Build both distributions of committed files.

    Args:
        archive: The files as a tar archive.
        address: Address of the repository in a browser, for the links of the README.
        folder: New folder, which gets `source` and `dist`.
        commit_time: Seconds since 1970, for the times of files.

    Returns:
        SHA-256 of each file in `dist`.
    """
    source, dist = folder / "source", folder / "dist"
    with tarfile.open(fileobj=BytesIO(archive)) as opened:
        opened.extractall(source, filter="data")
    version = check_versions(source)
    readme = source / "README.md"
    readme.write_text(with_absolute_links(readme.read_text(), address, f"v{version}"))
    run(
        sys.executable,
        "-m",
        "build",
        "--no-isolation",
        "--outdir",
        dist,
        cwd=source,
        environment={"SOURCE_DATE_EPOCH": commit_time},
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(dist.iterdir())}


def find_pythons() -> dict[str, str]:
    """Find the supported Pythons on the PATH; a version manager's placeholder does not run."""
    found = {name: path for name in PYTHONS if (path := shutil.which(name))}
    return {name: path for name, path in found.items() if not subprocess.run([path, "-c", ""], check=False).returncode}


def try_out(wheel: Path, python: str, folder: Path, version: str) -> None:
    """Install a wheel into an empty environment of a Python, and use it as a client.

    Raises:
        ReleaseError: It cannot be installed, or does not work.
    """
    run(python, "-m", "venv", folder)
    run(folder / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    run(folder / "bin" / "pip", "check", "--disable-pip-version-check")
    for command, expected in (
        ((folder / "bin" / "graphkiln", "--version"), f"graphkiln {version}\n"),
        ((folder / "bin" / "python", "-c", _FIRST_USE), "ConnectionFailed\n"),
    ):
        if (found := run(*command, cwd=folder)) != expected:
            raise ReleaseError(f"{python}: {command[0]} printed {found!r}, expected {expected!r}")


def run(*command: str | Path, cwd: Path | None = None, environment: Mapping[str, str] | None = None) -> str:
    """Run a command and return its output.

    Raises:
        ReleaseError: It failed; with its last lines.
    """
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env=variables | {**(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ReleaseError(f"{' '.join(map(str, command))} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return done.stdout


def release(address: str, target: Path) -> None:
    """Build, check and install a release of the last commit; write it to a folder.

    Raises:
        ReleaseError: A step failed. Nothing is written.
    """
    if changed := run("git", "status", "--porcelain", cwd=REPOSITORY):
        raise ReleaseError(f"commit or remove what was changed:\n{changed}")
    version = check_versions(REPOSITORY)
    commit_time = run("git", "log", "-1", "--format=%ct", cwd=REPOSITORY).strip()
    archive = subprocess.run(["git", "archive", "HEAD"], cwd=REPOSITORY, capture_output=True, check=True).stdout
    pythons = find_pythons()
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        print(f"graphkiln: building {version} twice")
        digests = [build(archive, address, folder / name, commit_time) for name in ("first", "second")]
        if digests[0] != digests[1]:
            raise ReleaseError(f"the second build has other bytes: {json.dumps(digests, indent=1)}")
        dist = folder / "first" / "dist"
        print(run(sys.executable, "-m", "twine", "check", "--strict", *sorted(dist.iterdir())), end="")
        for name, python in pythons.items():
            print(f"graphkiln: installing the wheel for {name}")
            try_out(dist / f"graphkiln-{version}-py3-none-any.whl", python, folder / name, version)
        for name in (each for each in PYTHONS if each not in pythons):
            print(f"graphkiln: not tried with {name}, which is not on the PATH")
        lines = "".join(f"{digest}  {name}\n" for name, digest in digests[0].items())
        (dist / "SHA256SUMS").write_text(lines)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(dist, target)
    print(f"{lines}graphkiln: {version} is in {target}; next: docs/releasing.md")


def main() -> None:
    """Build the release; exit with code 1 and the reason if that fails."""
    if len(sys.argv) != 2 or not sys.argv[1].startswith("https://"):
        sys.exit("graphkiln: scripts/release ADDRESS, such as https://github.com/OWNER/graphkiln")
    try:
        release(sys.argv[1], REPOSITORY / "dist")
    except ReleaseError as error:
        sys.exit(f"graphkiln: {error}")


if __name__ == "__main__":
    main()
