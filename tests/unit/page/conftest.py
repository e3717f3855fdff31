"""The page's application with a fake server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from shown_server import Shown
from starlette.testclient import TestClient

from graphkiln.page.app import build_app


@pytest.fixture
def shown(tmp_path: Path) -> Shown:
    return Shown(tmp_path)


@pytest.fixture
def page(shown: Shown) -> Iterator[TestClient]:
    with TestClient(build_app(shown.server(), ["models.example"]), base_url="http://127.0.0.1:8003") as client:
        yield client
