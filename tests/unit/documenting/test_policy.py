"""The page of the numeric policy."""

from __future__ import annotations

from documenting import policy
from graphkiln_backend.proof.policy import BY_PRECISION, REPLAY


def test_every_row_of_the_policy_is_there_with_its_figures() -> None:
    page = policy.render()
    lines = page.splitlines()
    for row in (*BY_PRECISION.values(), *REPLAY.values()):
        figures = f"| {row.relative_l2:.10g} | {'-' if row.worst_element is None else f'{row.worst_element:.10g}'} |"
        assert any(figures in line for line in lines), row.name
    assert "| fp32 | 0.99 | 0.1 | 0.001 | yes |" in page
    assert "5 times the row of their precision" in page
