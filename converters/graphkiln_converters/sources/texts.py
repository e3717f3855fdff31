"""Text vectorizers of scikit-learn: documents to prove them with, and options of skl2onnx for their export."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np

_DOCUMENTS = 320
_MOST_TERMS = 256
# glibc and musl have it on every machine, unlike the operator's default en_US.UTF-8.
_LOCALE = "C.UTF-8"
_WORD = r"[\pL\pN_]"  # Python's \w; that of RE2 is ASCII only
_SEPARATORS = (" ", " ", " ", "  ", ", ", ". ", "-", "'", "_", "/", "\n", "\t", "; ", "")
_BETWEEN = (
    *("a", "x", "I", "7", "é", "12", "the", "and"),
    *("not", "unknown", "Größe", "naïve", "日本", "don't", "a_b", "€"),
)
_ACCENTED = str.maketrans("aeiouncAEIOUNC", "áèîöúñçÁÈÎÖÚÑÇ")


def reads_documents(step: Any) -> bool:
    """Return true for a vectorizer of documents."""
    return hasattr(step, "build_analyzer")


def vectorizer_options(estimator: Any) -> dict[int, dict[str, str]]:
    """Return options of skl2onnx for the vectorizers of an estimator: token pattern and locale."""
    found = {}
    for step in vectorizers(estimator):
        options = {"locale": _LOCALE}
        if step.analyzer == "word" and isinstance(step.token_pattern, str):
            options["tokenexp"] = _for_re2(step.token_pattern)
        found[id(step)] = options
    return found


def _for_re2(pattern: str) -> str:
    """Translate a token pattern of Python to RE2.

    The operator has leftmost-longest matches, so that word boundaries around a pattern of word characters are implied.
    """
    pattern = pattern.removeprefix("(?u)")
    inner = re.fullmatch(r"\\b((?:\\w|[+*]|\{[0-9,]+\})+)\\b", pattern)
    return (inner[1] if inner else pattern).replace(r"\w", _WORD)


def vectorizers(estimator: Any) -> Iterator[Any]:
    """Yield the vectorizers of documents of an estimator."""
    if reads_documents(estimator):
        yield estimator
    for attribute in ("steps", "transformers_", "transformer_list"):
        for named in getattr(estimator, attribute, ()):
            yield from vectorizers(named[1])


def documents(vectorizer: Any) -> tuple[str, ...]:
    """Make documents of a vectorizer's vocabulary.

    They have single and repeated terms, in capitals and with accents, with short, unknown and stop words and
    punctuation between them; and there are empty ones.
    """
    generator = np.random.default_rng(0)
    terms = sorted(map(str, getattr(vectorizer, "vocabulary_", {"text": 0})))
    if len(terms) > _MOST_TERMS:
        terms = [terms[i] for i in sorted(generator.choice(len(terms), _MOST_TERMS, replace=False))]
    stop = sorted(vectorizer.get_stop_words() or ()) if hasattr(vectorizer, "get_stop_words") else []
    between = [*_BETWEEN, *stop[:: max(1, len(stop) // 16)]]
    made = ["", " ", *(terms[i] for i in generator.permutation(len(terms))[: _DOCUMENTS // 4])]

    def pick(words: Any) -> str:
        return str(words[generator.integers(len(words))])

    while len(made) < _DOCUMENTS:
        words: list[str] = []
        for _ in range(generator.integers(1, 9)):
            word = pick(terms)
            change = generator.integers(12)
            word = {0: word.upper(), 1: word.title(), 2: word.translate(_ACCENTED)}.get(int(change), word)
            words += [word] * int(generator.choice([1, 1, 1, 2, 5]))
            if generator.random() < 0.4:
                words.append(pick(between))
        plain = generator.random() < 0.5
        made.append("".join(word + (" " if plain else pick(_SEPARATORS)) for word in words))
    return tuple(made)
