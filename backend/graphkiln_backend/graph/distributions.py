"""Versions of installed distributions, read when something depends on them."""

from __future__ import annotations


def version_of(name: str) -> str:
    """The version of a distribution. Most starts ask for none, and what finds it takes 20 ms to import.

    Raises:
        PackageNotFoundError: It is not installed.
    """
    from importlib.metadata import version

    return version(name)


def installed_version(name: str) -> str:
    """The version of a distribution; empty where it is not installed."""
    from importlib.metadata import PackageNotFoundError

    try:
        return version_of(name)
    except PackageNotFoundError:
        return ""
