"""SeaweedFS, from PyPI: a real REST catalog of Iceberg tables, and the S3 server with their files."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import boto3
from running import free_ports

KEY, SECRET, REGION = "seaweed-key", "seaweed-secret", "us-east-1"
START_TIMEOUT_S = 120


class SeaweedServer:
    """Master, volumes, filer, S3 and catalog in one process, with an empty catalog `lake`; a context manager."""

    def __init__(self) -> None:
        self._ports = free_ports(10)
        self._folder = Path(tempfile.mkdtemp(prefix="graphkiln-seaweed-"))
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables that configure the catalog for pyiceberg."""
        address = f"http://127.0.0.1:{self._ports[9]}"
        facts = {
            "TYPE": "rest",
            "URI": address,
            "OAUTH2_SERVER_URI": f"{address}/v1/oauth/tokens",
            "WAREHOUSE": "s3://lake",
            "CREDENTIAL": f"{KEY}:{SECRET}",
            "S3__ENDPOINT": f"http://127.0.0.1:{self._ports[7]}",
            "S3__ACCESS_KEY_ID": KEY,
            "S3__SECRET_ACCESS_KEY": SECRET,
            "S3__REGION": REGION,
        }
        return {f"PYICEBERG_CATALOG__LAKE__{name}": value for name, value in facts.items()}

    def __enter__(self) -> SeaweedServer:
        credentials = [{"accessKey": KEY, "secretKey": SECRET}]
        identity = {"name": "admin", "credentials": credentials, "actions": ["Admin", "Read", "Write", "List"]}
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (self._folder / "data").mkdir()
        names = ("master.port", "master.port.grpc", "volume.port", "volume.port.grpc", "filer.port", "filer.port.grpc",
                 "filer.port.public", "s3.port", "s3.port.grpc", "s3.port.iceberg")  # fmt: skip
        flags = [f"-{name}={port}" for name, port in zip(names, self._ports, strict=True)]
        flags += [
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-filer",
            "-s3",
            "-s3.port.lance=0",
            f"-s3.config={self._folder}/s3.json",
        ]
        flags += [f"-dir={self._folder}/data", "-master.volumeSizeLimitMB=64", "-volume.max=20"]
        flags += [f"-filer.localSocket={self._folder}/filer.sock", f"-s3.localSocket={self._folder}/s3.sock"]
        program = str(Path(sys.executable).with_name("weed"))
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [program, "-logtostderr=true", "server", *flags], stdout=log, stderr=log, cwd=self._folder
            )
        end = time.monotonic() + START_TIMEOUT_S
        while not self._makes_catalog():
            if self._process.poll() is not None or time.monotonic() > end:
                said = (self._folder / "log").read_text(errors="replace")[-2000:]
                self.__exit__()
                raise RuntimeError(f"SeaweedFS does not serve: {said}")
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        if self._process:
            self._process.kill()
            self._process.wait()
        for port in self._ports:  # it puts its sockets there, wherever its data are
            for left in Path("/tmp").glob(f"seaweedfs-*-{port}.sock"):
                left.unlink(missing_ok=True)
        shutil.rmtree(self._folder)

    def _makes_catalog(self) -> bool:
        """Create the catalog, once all parts of the server have started."""
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            urllib.request.urlopen(f"http://127.0.0.1:{self._ports[9]}/v1/config", timeout=5).close()
            client = boto3.client(
                "s3tables",
                endpoint_url=f"http://127.0.0.1:{self._ports[7]}",
                aws_access_key_id=KEY,
                aws_secret_access_key=SECRET,
                region_name=REGION,
                config=Config(retries={"max_attempts": 0}, read_timeout=10),
            )
            try:
                client.create_table_bucket(name="lake")
            except ClientError as error:
                return "AlreadyExists" in str(error) or "Conflict" in str(error)
            finally:
                client.close()
        except (OSError, urllib.error.HTTPError, BotoCoreError):
            return False
        return True
