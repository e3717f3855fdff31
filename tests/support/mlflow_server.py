"""A real tracking server of MLflow on a free port, with its database and artifacts in a temporary folder."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from running import free_ports

START_TIMEOUT_S = 120  # it creates its database in fifty migrations


class MlflowServer:
    """The server, a context manager."""

    def __init__(self) -> None:
        (port,) = free_ports(1)
        self.address = f"http://127.0.0.1:{port}"
        self.folder = Path(tempfile.mkdtemp(prefix="graphkiln-mlflow-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def artifacts(self) -> Path:
        """Folder of the artifacts."""
        return self.folder / "artifacts"

    def __enter__(self) -> MlflowServer:
        command = [
            *(
                sys.executable,
                "-m",
                "mlflow",
                "server",
                "--host",
                "127.0.0.1",
                "--port",
                self.address.rpartition(":")[2],
            ),
            *("--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/mlflow.db"),
            *("--artifacts-destination", str(self.artifacts)),
        ]
        silent = {"MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
        with (self.folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | silent, cwd=self.folder, start_new_session=True
            )
        end = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                log_text = (self.folder / "log").read_text()
                self.__exit__()
                raise RuntimeError(f"MLflow does not serve: {log_text}")
            time.sleep(0.1)
        return self

    def stop(self) -> None:
        """End the server and its workers."""
        if self._process:
            os.killpg(self._process.pid, signal.SIGKILL)  # the leader of its session
            self._process.wait()
            self._process = None

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self.folder)

    def _answers(self) -> bool:
        try:
            urllib.request.urlopen(f"{self.address}/health", timeout=1).close()
        except OSError:
            return False
        return True
