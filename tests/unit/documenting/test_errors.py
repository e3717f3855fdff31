"""The page of errors."""

from __future__ import annotations

from documenting import errors
from graphkiln_backend.graph import errors as tree


def test_every_error_is_there_below_its_base() -> None:
    found = list(errors.tree())
    assert set(found) == {
        each for each in vars(tree).values() if isinstance(each, type) and issubclass(each, Exception)
    }
    assert all(found.index(each.__bases__[0]) < found.index(each) for each in found[1:])  # type: ignore[arg-type]


def test_codes_are_those_of_the_classes() -> None:
    page = errors.render()
    assert "| `InvalidInput` | `ClientError` | 2 | INVALID_ARG: 400, INVALID_ARGUMENT |" in page
    assert "| `GraphkilnError` |  | 1 | INTERNAL: 500, INTERNAL |" in page
    assert "`retry_after_s`: Seconds to wait" in page
