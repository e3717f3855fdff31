"""A real registry (Debian's `docker-registry`), which can stop and restart with its contents."""

from __future__ import annotations

import shutil
import subprocess
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from running import free_ports

needs_registry = pytest.mark.skipif(
    shutil.which("docker-registry") is None, reason="no registry on this machine: apt-get install docker-registry"
)
_CONFIG = """
version: 0.1
log: {{level: error}}
storage: {{filesystem: {{rootdirectory: "{folder}/data"}}}}
http: {{addr: "127.0.0.1:{port}"}}
{auth}
"""
_BASIC = """auth: {{htpasswd: {{realm: models, path: "{folder}/passwords"}}}}"""


class OciServer:
    """The registry, a context manager.

    Args:
        folder: For what it holds.
        passwords: Lines of an htpasswd file (bcrypt): nobody else gets in.
    """

    def __init__(self, folder: Path, passwords: str = "") -> None:
        (self._port,) = free_ports(1)
        self.folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(exist_ok=True)
        (folder / "passwords").write_text(passwords)
        auth = _BASIC.format(folder=folder) if passwords else ""
        (folder / "config.yml").write_text(_CONFIG.format(folder=folder, port=self._port, auth=auth))

    @property
    def host(self) -> str:
        """`HOST:PORT`."""
        return f"127.0.0.1:{self._port}"

    def start(self) -> None:
        """Start or restart."""
        with (self.folder / "log").open("ab") as log:
            command = ["docker-registry", "serve", self.folder / "config.yml"]
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while not self._answers():
            assert self._process.poll() is None, (self.folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def stop(self) -> None:
        """Stop; the contents stay."""
        if self._process:
            self._process.terminate()
            self._process.wait(60)
            self._process = None

    def blob(self, digest: str) -> Path:
        """Path of a blob."""
        name = digest.removeprefix("sha256:")
        return self.folder / "data/docker/registry/v2/blobs/sha256" / name[:2] / name / "data"

    def _answers(self) -> bool:
        try:
            with urlopen(f"http://{self.host}/v2/"):
                return True
        except URLError as error:
            return getattr(error, "code", None) == 401
        except OSError:
            return False

    def __enter__(self) -> OciServer:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
