"""Addresses of other sites in the pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from documenting.links import addresses, fault_of, outside_links


def test_those_of_examples_and_of_this_machine_are_none() -> None:
    text = """
    [a](https://docs.astral.sh/uv/), https://in-toto.io. <https://b.example.org/x> http://localhost:8000
    http://127.0.0.1:8003, https://HOST/x, `https://github.com/OWNER/x` http://prometheus:9090 s3://https://minio.example.com:9
    """
    assert list(addresses(text)) == ["https://docs.astral.sh/uv/", "https://in-toto.io", "https://github.com/OWNER/x"]


@pytest.mark.parametrize(
    ("address", "fault"),
    [
        ("https://in-toto.io", ""),
        ("https://github.com/a/b", ""),
        ("https://github.com/a/b/blob/v1.2/main/x.md", ""),
        ("http://in-toto.io", "not https"),
        ("https://me:pass@in-toto.io", "password"),
        ("https://github.com/a/b/blob/main/README.md", "moves"),
        ("https://github.com/a/b/tree/master", "moves"),
        ("https://raw.githubusercontent.com/a/b/main/x", "moves"),
    ],
)
def test_faults(address: str, fault: str) -> None:
    told = fault_of(address)
    assert fault in told
    assert bool(fault) == bool(told)


def test_those_of_the_pages_have_none(repository: Path) -> None:
    found = outside_links(repository)
    assert ("docs/releasing.md", "https://docs.astral.sh/uv/") in found
    assert [(page, address) for page, address in found if fault_of(address)] == []
