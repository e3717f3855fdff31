"""Numpy's table of C functions: what a call finds in it, and what everybody else does."""

from __future__ import annotations

import ctypes

import pytest

from graphkiln_backend.triton.numpy_functions import NEW_COPY, NEW_FROM_DESCR, call_with, table

OTHER = ctypes.c_void_p(0x1234)


def places() -> tuple[int, int]:
    functions = table()
    return functions[NEW_COPY], functions[NEW_FROM_DESCR]


def test_only_the_call_finds_the_other_function() -> None:
    before, found = places(), list[tuple[int, int]]()
    call_with(NEW_COPY, OTHER, lambda: found.append(places()))
    assert found == [(OTHER.value, before[1])]
    assert places() == before


def test_it_is_put_back_after_an_error() -> None:
    before = places()
    with pytest.raises(ZeroDivisionError):
        call_with(NEW_FROM_DESCR, OTHER, lambda: 1 / 0)
    assert places() == before
