"""The ranking that a graph publishes."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import ManifestError
from graphkiln_backend.graph.ranking import Ranking

RANKING = Ranking(scores="s", indices="i", labels=("a", "b", "c", "d"))


def test_is_read_as_it_was_written() -> None:
    assert Ranking.from_json(RANKING.to_json()) == RANKING


@pytest.mark.parametrize("text", ["", "[]", '{"scores": "s"}', '{"scores": "s", "indices": "i", "k": 5}'])
def test_nonsense(text: str) -> None:
    with pytest.raises(ManifestError):
        Ranking.from_json(text)


def test_the_published_text_is_one_line_of_unescaped_json() -> None:
    ranking = Ranking(scores="s", indices="i", labels=("größe", "two\nlines"))
    assert ranking.to_json() == '{"scores":"s","indices":"i","labels":["größe","two\\nlines"]}'


def test_a_ranking_without_labels() -> None:
    assert Ranking.from_json('{"scores": "s", "indices": "i"}').labels == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the ranking is not JSON"),
        ('{"scores": "s"}', "missing key 'ranking.indices'"),
        ('{"scores": "s", "indices": 0}', "'ranking.indices' must be a value of type str, got 0"),
        ('{"scores": "s", "indices": "i", "labels": "abc"}', "'ranking.labels' must be a list"),
        ('{"scores": "s", "indices": "i", "labels": [1]}', "'ranking.labels[0]' must be a value of type str"),
        ('{"scores": "s", "indices": "i", "label": []}', "unknown key 'ranking.label' (did you mean 'labels'?)"),
    ],
)
def test_a_bad_key_is_named(text: str, message: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Ranking.from_json(text)
    assert message in str(caught.value)
