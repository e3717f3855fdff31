"""Results that were kept, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kept_results import read_results

from graphkiln_backend.graph.errors import ManifestError


def write(path: Path, **fields: Any) -> Path:
    path.write_text(json.dumps({"rows": [{"ratio": 1.0}], **fields}))
    return path


def test_the_command_says_of_which_benchmark_it_is(tmp_path: Path) -> None:
    named = write(tmp_path / "yesterday.json", command="scripts/benchmark start --rounds 2 --seconds 3", title="t")
    ((name, result),) = read_results(named).items()
    assert (name, result.benchmark, result.title, result.rows) == ("start", "start", "t", [{"ratio": 1.0}])
    assert list(read_results(write(tmp_path / "memory.json"))) == ["memory"]


def test_the_machine_is_that_of_its_facts(tmp_path: Path) -> None:
    facts = {"machine": "A, 2 cores", "gpu": "none", "date": "today"}
    (alone,) = read_results(write(tmp_path / "a.json", facts=facts)).values()
    (beside,) = read_results(write(tmp_path / "b.json", facts={**facts, "gpu": "H100"})).values()
    (unknown,) = read_results(write(tmp_path / "c.json")).values()
    assert (alone.machine, beside.machine, unknown.machine) == ("A, 2 cores", "A, 2 cores, H100", "")


def test_a_folder_has_one_of_each(tmp_path: Path) -> None:
    for name in ("start", "light"):
        write(tmp_path / f"{name}.json", command=f"scripts/benchmark {name} --rounds 1")
    assert sorted(read_results(tmp_path)) == ["light", "start"]
    write(tmp_path / "start-old.json", command="scripts/benchmark start --rounds 1")
    with pytest.raises(ManifestError, match="two results of start"):
        read_results(tmp_path)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '"rows"', '{"rows": 3}', '{"rows": [1]}', '{"rows": [], "facts": 3}', "[" * 100_000, "\xff"],
)
def test_what_is_no_result_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="latin-1")
    for path in (tmp_path / "a.json", tmp_path):
        with pytest.raises(ManifestError, match=r"a\.json is no result"):
            read_results(path)
    with pytest.raises(ManifestError, match=r"nowhere\.json is no result"):
        read_results(tmp_path / "nowhere.json")
