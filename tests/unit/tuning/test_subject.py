"""A model as it is tuned: what serves it today."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from digits_subject import digits_subject

from graphkiln.tuning.subject import check_tunable, read_subject, served_versions, vanishing_cache
from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.config_changes import NO_BATCHER


def test_a_version_is_read_as_the_server_would(digits: Path) -> None:
    with vanishing_cache() as cache:
        subject = read_subject(digits / "1", cache)
    assert (subject.name, subject.version, subject.folder) == ("digits", 1, digits)
    assert subject.config.max_batch_size == 32
    assert subject.queue_delay_us == 0
    assert subject.single_group
    assert not subject.schedules_sequences
    assert subject.mixing == ""
    assert [spec.name for spec in subject.signature.inputs] == ["INPUT_0"]
    assert subject.deployment.plan.configs[0].engine == "onnxruntime"


@pytest.mark.parametrize(
    ("added", "delay"),
    [
        ("max_batch_size: 1", NO_BATCHER),
        ("dynamic_batching { max_queue_delay_microseconds: 700 }", 700),
    ],
)
def test_the_queue_delay_is_that_of_the_batcher(digits: Path, tmp_path: Path, added: str, delay: int) -> None:
    model = tmp_path / "digits"
    shutil.copytree(digits, model)
    (model / "config.pbtxt").write_text(f'name: "digits" backend: "graphkiln" {added}\n')
    with vanishing_cache() as cache:
        assert read_subject(model / "1", cache).queue_delay_us == delay


def test_a_version_that_is_not_there_is_refused(digits: Path) -> None:
    with vanishing_cache() as cache, pytest.raises(RepositoryError):
        read_subject(digits / "9", cache)


def test_what_parallel_spreads_is_refused(digits: Path, tmp_path: Path) -> None:
    model = tmp_path / "digits"
    shutil.copytree(digits, model)
    with (model / "config.pbtxt").open("a") as config:
        config.write('parameters { key: "parallel" value { string_value: "data=1, pipeline=1" } }\n')
    with vanishing_cache() as cache:
        subject = read_subject(model / "1", cache)
    with pytest.raises(RepositoryError, match=r"spreads 'digits' over devices \(parallel: data=1.*explain"):
        check_tunable(subject)


def test_sequences_are_refused(repository: Path) -> None:
    subject = digits_subject(repository)
    check_tunable(subject)
    with pytest.raises(RepositoryError, match="schedule sequences"):
        check_tunable(replace(subject, schedules_sequences=True))


def test_the_version_policy_says_what_is_served(digits: Path, repository: Path, tmp_path: Path) -> None:
    model = tmp_path / "digits"
    for version in ("1", "2", "7"):
        shutil.copytree(digits / "1", model / version)
    (model / "notes").mkdir()
    subject = digits_subject(repository)
    for policy, served in (("", [7]), ("all {}", [1, 2, 7]), ("latest { num_versions: 2 }", [2, 7])):
        (model / "config.pbtxt").write_text(f"version_policy {{ {policy} }}\n" if policy else "")
        assert served_versions(replace(subject, folder=model)) == served


def test_ensembles_of_its_store_are_known(digits: Path, tmp_path: Path) -> None:
    shutil.copytree(digits, tmp_path / "digits")
    (tmp_path / "both").mkdir()
    step = 'ensemble_scheduling { step { model_name: "digits" model_version: -1 } }'
    (tmp_path / "both" / "config.pbtxt").write_text(f'platform: "ensemble" max_batch_size: 4 {step}\n')
    with vanishing_cache() as cache:
        assert read_subject(tmp_path / "digits" / "1", cache).ensembles == {"both": 4}
