"""Changes to a configuration: what they set and what they keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.config import ModelConfigProto, read_config
from graphkiln_backend.repository.config_changes import NO_BATCHER, ConfigChanges, changed_text

TEXT = """# served since spring
# by the vision team

name: "m"
max_batch_size: 8  # measured
dynamic_batching { preferred_batch_size: [4, 8] max_queue_delay_microseconds: 100 }
parameters { key: "engine" value { string_value: "openvino" } }
parameters { key: "preprocess" value { string_value: "{}" } }
model_warmup { name: "w" batch_size: 4 }
version_policy { latest { num_versions: 2 } }
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "config.pbtxt"
    path.write_text(TEXT)
    return path


def change(path: Path, changes: ConfigChanges) -> ModelConfigProto:
    path.write_text(changed_text(path, changes))
    return read_config(path)


def test_only_head_comments_are_kept(path: Path, tmp_path: Path) -> None:
    assert "measured" not in changed_text(path, ConfigChanges())
    path.write_text('name: "m"  # here\n')
    assert changed_text(path, ConfigChanges()) == 'name: "m"\n'
    assert changed_text(tmp_path / "none.pbtxt", ConfigChanges(max_batch_size=2)) == "max_batch_size: 2\n"


def test_parameters_are_set_and_removed(path: Path) -> None:
    config = change(path, ConfigChanges(parameters={"engine": "", "threads": "2", "streams": ""}))
    assert {key: row.string_value for key, row in config.parameters.items()} == {"preprocess": "{}", "threads": "2"}


def test_instance_group_is_added_or_changed(path: Path) -> None:
    config = change(path, ConfigChanges(instances=2))
    assert [(group.count, group.kind) for group in config.instance_group] == [(2, config.instance_group[0].KIND_CPU)]
    config = change(path, ConfigChanges(instances=3, on_gpu=True))
    assert [(group.count, group.kind) for group in config.instance_group] == [(3, config.instance_group[0].KIND_CPU)]


def test_several_instance_groups_are_refused(path: Path) -> None:
    path.write_text("instance_group { count: 1 } instance_group { count: 2 }")
    with pytest.raises(RepositoryError, match="has 2 instance groups"):
        changed_text(path, ConfigChanges(instances=2))


def test_smaller_batch_limits_preferred_sizes_and_warmup(path: Path) -> None:
    config = change(path, ConfigChanges(max_batch_size=4))
    assert config.max_batch_size == 4
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert change(path, ConfigChanges(max_batch_size=2)).model_warmup[0].batch_size == 2
    assert change(path, ConfigChanges(max_batch_size=0)).model_warmup[0].batch_size == 1, "0 is no warm-up"


def test_queue_delay_and_removal_of_the_batcher(path: Path) -> None:
    config = change(path, ConfigChanges(queue_delay_us=500, preferred_batch_sizes=(2,)))
    assert config.dynamic_batching.max_queue_delay_microseconds == 500
    assert list(config.dynamic_batching.preferred_batch_size) == [2]
    assert not change(path, ConfigChanges(queue_delay_us=NO_BATCHER)).HasField("dynamic_batching")
    config = change(path, ConfigChanges(queue_delay_us=0))
    assert config.HasField("dynamic_batching")
    assert config.dynamic_batching.max_queue_delay_microseconds == 0


def test_queue_policies_survive_the_batcher(path: Path) -> None:
    """Requests that were refused, timed out or put first are so without batches, too."""
    policy = "priority_levels: 2 default_priority_level: 1 default_queue_policy { max_queue_size: 9 }"
    path.write_text(TEXT.replace("max_queue_delay_microseconds: 100", f"max_queue_delay_microseconds: 100 {policy}"))
    batching = change(path, ConfigChanges(max_batch_size=1, queue_delay_us=NO_BATCHER)).dynamic_batching
    assert (batching.priority_levels, batching.default_queue_policy.max_queue_size) == (2, 9)
    assert not batching.preferred_batch_size
    assert not batching.max_queue_delay_microseconds
    path.write_text(TEXT)
    assert not change(path, ConfigChanges(max_batch_size=1, queue_delay_us=NO_BATCHER)).HasField("dynamic_batching")
    path.write_text('name: "m"\n')
    assert not change(path, ConfigChanges(queue_delay_us=NO_BATCHER)).HasField("dynamic_batching")
