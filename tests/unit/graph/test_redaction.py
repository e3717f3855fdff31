"""Nothing secret stands in what is shown to others."""

from __future__ import annotations

import pytest

from graphkiln_backend.graph.text import redact, redact_command


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
def test_no_credential_is_shown(text: str, shown: str) -> None:
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
def test_a_command_holds_none(words: list[str], shown: list[str]) -> None:
    assert redact_command(words) == shown
