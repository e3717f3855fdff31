"""A real Prometheus on a free port with the configuration of deploy/compose."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from running import free_ports

START_TIMEOUT_S = 120

needs_prometheus = pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="no Prometheus on this machine: apt-get install prometheus"
)
needs_promtool = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool on this machine: apt-get install prometheus"
)


class PrometheusServer:
    """The server; use it as a context manager.

    Args:
        configuration: Configuration of deploy/compose; targets are replaced, and intervals shortened.
        target: `HOST:PORT` to scrape.
        folder: Empty folder for its data.
    """

    def __init__(self, configuration: Path, target: str, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self._folder = folder
        settings = yaml.safe_load(configuration.read_text())
        settings["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "1s"}
        settings["rule_files"] = [str(configuration.parent / each) for each in settings["rule_files"]]
        job, _edge = settings["scrape_configs"]
        job["static_configs"] = [{"targets": [target]}]
        settings["scrape_configs"] = [job]  # rules and dashboard use no metrics of the edge
        (folder / "prometheus.yml").write_text(yaml.safe_dump(settings))

    def __enter__(self) -> PrometheusServer:
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={self._folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={self._folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                ],
                stdout=log,
                stderr=log,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def get(self, path: str, **parameters: str) -> Any:
        """Get the `data` of a response of its HTTP API.

        Raises:
            AssertionError: It refuses the request, such as an invalid query.
        """
        end = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                with urlopen(f"http://127.0.0.1:{self.port}/api/v1/{path}?{urlencode(parameters)}") as answer:
                    return json.load(answer)["data"]
            except URLError as error:
                if isinstance(error, HTTPError) and error.code != HTTPStatus.SERVICE_UNAVAILABLE:
                    raise AssertionError(f"{parameters}: {error}") from error
                assert self._process.poll() is None, (self._folder / "log").read_text()
                assert time.monotonic() < end, (self._folder / "log").read_text()
                time.sleep(0.1)
