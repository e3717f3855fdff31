"""rclone's S3 server, from PyPI: a real server that accepts conditions on a put and ignores them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from running import free_ports

START_TIMEOUT_S = 30


class RcloneServer:
    """The server with one bucket, `models`; a context manager.

    Its credentials are those of `object_store.CREDENTIALS`.
    """

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        self._folder = Path(tempfile.mkdtemp(prefix="graphkiln-rclone-"))
        (self._folder / "models").mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return f"127.0.0.1:{self._port}"

    def __enter__(self) -> RcloneServer:
        program = str(Path(sys.executable).with_name("rclone"))
        flags = ["--auth-key", "key,secret", "--addr", self.address, "--config", "/dev/null"]
        self._process = subprocess.Popen(
            [program, "serve", "s3", *flags, str(self._folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        end = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self.__exit__()
                raise RuntimeError("rclone does not serve")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"http://{self.address}/", timeout=1).close()
        except urllib.error.HTTPError as error:
            error.close()
            return True
        except OSError:
            return False
        return True
