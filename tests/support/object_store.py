"""A real S3 server in this process (moto), which can stop and restart with its contents."""

from __future__ import annotations

import logging
from typing import Any

import boto3
from moto.server import ThreadedMotoServer
from running import free_ports

CREDENTIALS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_DEFAULT_REGION": "us-east-1"}


class ObjectStore:
    """The server, a context manager."""

    def __init__(self) -> None:
        (self._port,) = free_ports(1)
        self._server: ThreadedMotoServer | None = None
        logging.getLogger("werkzeug").setLevel(logging.ERROR)

    @property
    def address(self) -> str:
        """`HOST:PORT`."""
        return f"127.0.0.1:{self._port}"

    def bucket(self, name: str) -> Any:
        """Create a bucket if it is missing."""
        keys = {"aws_access_key_id": "key", "aws_secret_access_key": "secret", "region_name": "us-east-1"}
        return boto3.resource("s3", endpoint_url=f"http://{self.address}", **keys).create_bucket(Bucket=name)

    def start(self) -> None:
        """Start or restart."""
        self._server = ThreadedMotoServer(ip_address="127.0.0.1", port=self._port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        """Stop; the contents stay."""
        if self._server:
            self._server.stop()
            self._server = None

    def __enter__(self) -> ObjectStore:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
