"""The search for the row that ends its worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphkiln_backend.scoring.outcomes import Span
from graphkiln_backend.scoring.schedule import RowSearch


def run(search: RowSearch, guilty: set[int]) -> int:
    """Probes until the search is over; how often."""
    probes = 0
    while not search.is_over:
        probes += 1
        span = search.probe
        if guilty & set(range(span.start, span.stop)):
            search.ended()
        else:
            search.survived()
    return probes


@given(st.data())
def test_one_of_the_guilty_rows_is_found_wherever_the_search_begins(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 300))
    guilty = data.draw(st.sets(st.integers(0, rows - 1), min_size=1))
    stop = data.draw(st.integers(1, rows))
    search = RowSearch(rows, Span(start=data.draw(st.integers(0, stop - 1)), stop=stop))
    probes = run(search, guilty)
    assert search.guilty in guilty
    assert probes <= rows.bit_length() + 3


def test_a_good_guess_saves_probes() -> None:
    assert run(RowSearch(4096, Span(start=1000, stop=1008)), {1003}) < run(RowSearch(4096), {1003})


def test_a_worker_that_ends_for_another_reason_makes_no_row_guilty() -> None:
    search = RowSearch(100)
    run(search, set())
    assert search.inconclusive
    assert search.guilty is None


def test_a_row_is_guilty_only_when_it_did_it_twice() -> None:
    search = RowSearch(1)
    search.ended()
    assert not search.is_over
    search.survived()
    assert search.inconclusive
