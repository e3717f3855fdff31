"""Versions of installed distributions."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError

import numpy as np
import pytest

from graphkiln_backend.graph.distributions import installed_version, version_of


def test_the_version_is_that_of_the_distribution() -> None:
    assert version_of("numpy") == np.__version__


def test_one_that_is_not_installed_is_an_error() -> None:
    with pytest.raises(PackageNotFoundError):
        version_of("graphkiln-no-such-distribution")


def test_or_empty_where_that_is_an_answer() -> None:
    assert installed_version("numpy") == np.__version__
    assert installed_version("graphkiln-no-such-distribution") == ""
