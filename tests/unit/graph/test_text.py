"""Sizes, durations, hints, redaction, error texts and model names."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.errors import InvalidInput
from graphkiln_backend.graph.text import (
    LIMIT_BYTES,
    MAX_LENGTH,
    bounded,
    did_you_mean,
    fault_in_name,
    fault_in_served_name,
    in_path,
    parse_duration,
    plain_reason,
    read_size,
    redact,
    redact_command,
    without_traceback,
)


@pytest.mark.parametrize(
    ("text", "size"), [("0", 0), ("123", 123), ("1.5k", 1536), ("500M", 500 << 20), (" 2TiB ", 2 << 40), ("7B", 7)]
)
def test_sizes(text: str, size: int) -> None:
    assert read_size(text) == size


@pytest.mark.parametrize("text", ["", "G", "-1", "1 2", "1P", "1e3", "9" * 400])
def test_invalid_sizes(text: str) -> None:
    assert read_size(text) is None


# Durations.


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("50ms", 0.05), ("2.5s", 2.5), ("20m", 1200), ("20 min", 1200), ("6h", 21600), ("1.5d", 129600),
        ("500 us", 5e-4), ("1e3MS", 1),
    ],
)  # fmt: skip
def test_durations(text: str, seconds: float) -> None:
    assert parse_duration(text, "--p99") == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "50", "6", "h", "ms", "-5ms", "-1h", "0m", "5 apples", "nan", "inf ms", "1e999s"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"--within .*: expected a time.*such as 90m, 6h or 2d"):
        parse_duration(text, "--within", "90m, 6h or 2d")


# Hints for names that do not exist.


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("labls", ["labels", "layout"], "did you mean 'labels'?"),
        ("zzz", ["labels", "layout"], "known: labels, layout"),
        ("zzz", [], "known: none"),
        ("", ["labels"], "known: labels"),
    ],
)
def test_did_you_mean(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known) == hint


# Redaction of secrets.


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("postgresql://user:secret@host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://user:s@cret@host:5432/db", "postgresql://host:5432/db"),
        ("postgresql://host/db?user=a&password=secret&table=t", "postgresql://host/db?user=a&password=...&table=t"),
        ("password=secret host=db", "password=... host=db"),
        ("host=db password='a \\' b' user=u", "host=db password=... user=u"),
        ("s3://AKIAIOSFODNN7EXAMPLE:wJal/rXUt@bucket/a", "s3://bucket/a"),
        ("500 for https://h/a?X-Amz-Signature=abc&b=9 (gone)", "500 for https://h/a?X-Amz-Signature=...&b=9 (gone)"),
        ("https://h/a?sv=1&sig=abc", "https://h/a?sv=1&sig=..."),
        ("https://h/a?GoogleAccessId=me&signature=x", "https://h/a?GoogleAccessId=me&signature=..."),
        ("oci://host:5000/models@sha256:0a", "oci://host:5000/models@sha256:0a"),
        ("hf://owner/repository@main/x", "hf://owner/repository@main/x"),
        ("s3://bucket/a@b", "s3://bucket/a@b"),
        ("/photos/a@b", "/photos/a@b"),
        ("cannot connect to postgresql://u:secret@host/db: refused", "cannot connect to postgresql://host/db: refused"),
    ],
)
def test_redact(text: str, shown: str) -> None:
    assert redact(text) == shown


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["bench", "--model", "m"], ["bench", "--model", "m"]),
        (["bench", "--url", "http://me:secret@h:1"], ["bench", "--url", "http://h:1"]),
        (["bench", "--url=http://me:secret@h:1"], ["bench", "--url=http://h:1"]),
        (["--header", "Authorization: Bearer secret", "-n"], ["--header", "Authorization: ...", "-n"]),
        (["--header=Authorization: Bearer secret"], ["--header=Authorization: ..."]),
        (["--input", "a:b", "--header"], ["--input", "a:b", "--header"]),
    ],
)
def test_redact_command(words: list[str], shown: list[str]) -> None:
    assert redact_command(words) == shown


# Error texts.

_TRACE = "\n\nAt:\n  /a b/model.py(97): _load\n  /a b/model.py(84): initialize\n"


@pytest.mark.parametrize("text", ["", "short", "ä" * (LIMIT_BYTES // 2), "x" * LIMIT_BYTES])
def test_bounded_keeps_short_texts(text: str) -> None:
    assert bounded(text) == text


@pytest.mark.parametrize("letter", ["x", "ä", "€", "\N{BRICK}"])
@pytest.mark.parametrize("begin", ["", "a", "ab", "abc"])
def test_bounded_cuts_between_characters(letter: str, begin: str) -> None:
    cut = bounded(begin + letter * 100_000)
    assert LIMIT_BYTES - 4 < len(cut.encode()) <= LIMIT_BYTES
    kept, _, end = cut.partition(" ... ")
    assert kept == begin + letter * (len(kept) - len(begin))
    assert end == f"({len(begin) + 100_000 * len(letter.encode())} bytes in all)"


def test_bounded_replaces_invalid_characters() -> None:
    """A file name may hold bytes that are not UTF-8."""
    assert bounded("file \udcff") == "file ?"


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (f"Internal: TritonModelException: m: cut short{_TRACE}", "m: cut short"),
        (f"Internal: ValueError: two\nlines{_TRACE};", "ValueError: two lines"),
        ("unloaded", "unloaded"),
        ("", ""),
    ],
)
def test_plain_reason(text: str, cause: str) -> None:
    assert plain_reason(text) == cause


def test_without_traceback() -> None:
    text = f"load failed for model 'm': version 1: one{_TRACE};\nversion 2: two{_TRACE};\n"
    assert without_traceback(text) == "load failed for model 'm': version 1: one\nversion 2: two"


# Names of models.


@pytest.mark.parametrize("name", ["m", "resnet50", "ViT_b-16.v2", "_m", "9", "a" * MAX_LENGTH])
def test_valid_names(name: str) -> None:
    assert fault_in_name(name) == ""
    assert fault_in_served_name(name) == ""


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", ".hidden", "-flag", "a/b", "../m", "a\\b", "a b", "a\n", "\n", "a\x00", "a\x1b[2J", "\x7f"),
        *("m\u00fcll", "a\u202eb", "\u0661", "a;b", "$(x)", "a'b", "a*", "m" * (MAX_LENGTH + 1), "m" * 256),
    ],
)
def test_invalid_names(name: str) -> None:
    fault = fault_in_name(name)
    assert fault.isprintable()
    assert fault
    assert len(fault) < 200


@pytest.mark.parametrize("name", ["a b", "a;touch x", "$(x)", "`x`", "a\nb", "a&b", "a'b", "", "m" * 201])
def test_names_that_cannot_be_served(name: str) -> None:
    assert fault_in_served_name(name)


@pytest.mark.parametrize("name", ["a+b", "a@2", "-m", "m" * 200])
def test_names_that_can_only_be_served(name: str) -> None:
    assert fault_in_served_name(name) == ""


@pytest.mark.parametrize("name", ["a+b", "a@2", "a=b,c:d", "100%", "a%20b", "-m"])
def test_served_names_are_not_escaped(name: str) -> None:
    """Triton undoes no escapes; see tests/integration/test_page_programs.py."""
    assert not fault_in_served_name(name)
    assert in_path(name) == name


@pytest.mark.parametrize(
    ("name", "path"), [("a/b", "a%2Fb"), ("a?b#c", "a%3Fb%23c"), ("a b", "a%20b"), ("\u00e4", "%C3%A4")]
)
def test_other_names_are_escaped(name: str, path: str) -> None:
    assert in_path(name) == path
