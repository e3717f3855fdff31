"""Changes to a config.pbtxt that affect how a model is served, never what it computes.

Tensors, labels, version policy, warm-up and published parameters are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path

from google.protobuf import text_format

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.config import ModelConfigProto, pb, read_config

# As a queue delay: no dynamic batcher.
NO_BATCHER = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChanges:
    """Changes; None keeps a field.

    Attributes:
        parameters: Keys of `parameters` with their values; an empty value takes the key out.
        instances: How many, in the only instance group.
        max_batch_size: Largest batch.
        queue_delay_us: Microseconds that the dynamic batcher waits for more requests; `NO_BATCHER` takes it out, but
            for its queues' own policies.
        preferred_batch_sizes: Sizes that the dynamic batcher prefers.
        on_gpu: Where instances run when the configuration names no group.
    """

    parameters: Mapping[str, str] = field(default_factory=dict)
    instances: int | None = None
    max_batch_size: int | None = None
    queue_delay_us: int | None = None
    preferred_batch_sizes: tuple[int, ...] | None = None
    on_gpu: bool = False

    def apply(self, config: ModelConfigProto) -> None:
        """Change a configuration in place.

        Raises:
            RepositoryError: It has several instance groups, and their number is to change.
        """
        for key, value in self.parameters.items():
            if value:
                config.parameters[key].string_value = value
            else:
                config.parameters.pop(key, None)
        if self.instances is not None:
            _set_instances(config, self.instances, on_gpu=self.on_gpu)
        if self.max_batch_size is not None:
            _set_batch(config, self.max_batch_size)
        if self.queue_delay_us is not None:
            _set_delay(config, self.queue_delay_us)
        if self.preferred_batch_sizes is not None and config.HasField("dynamic_batching"):
            config.dynamic_batching.preferred_batch_size[:] = self.preferred_batch_sizes


def changed_text(path: Path, changes: ConfigChanges) -> str:
    """Return the text of a config.pbtxt after changes, in protobuf's text format.

    Only the comments at the head of the file are kept: callers leave a copy of the file, and tell users of it.

    Args:
        path: The file; a missing one is an empty configuration.
        changes: What to change.

    Raises:
        RepositoryError: The file is not a model configuration, or cannot be changed so.
    """
    config = read_config(path)
    changes.apply(config)
    lines = path.read_text(encoding="utf-8-sig").splitlines() if path.exists() else []
    head = takewhile(lambda line: not line.strip() or line.startswith("#"), lines)
    comments = "\n".join(head).strip()
    return (f"{comments}\n" if comments else "") + text_format.MessageToString(config)


def has_one_group(config: ModelConfigProto) -> bool:
    """Return true for at most one instance group."""
    return len(config.instance_group) <= 1


def _set_instances(config: ModelConfigProto, count: int, *, on_gpu: bool) -> None:
    if not has_one_group(config):
        raise RepositoryError(
            f"config.pbtxt of '{config.name}' has {len(config.instance_group)} instance groups",
            hint="leave the number of instances as it is, or make them one group",
        )
    if not config.instance_group:
        group = pb.ModelInstanceGroup
        config.instance_group.add(kind=group.KIND_GPU if on_gpu else group.KIND_CPU)
    config.instance_group[0].count = count


def _set_batch(config: ModelConfigProto, size: int) -> None:
    config.max_batch_size = size
    for warmup in config.model_warmup:
        warmup.batch_size = min(warmup.batch_size, max(1, size))  # 0 is no warm-up
    if config.HasField("dynamic_batching"):
        preferred = [each for each in config.dynamic_batching.preferred_batch_size if each <= size]
        config.dynamic_batching.preferred_batch_size[:] = preferred


def _set_delay(config: ModelConfigProto, delay_us: int) -> None:
    """Without a batcher, Triton's default scheduler serves: a scheduling choice must not be left open.

    `max_batch_size` above 1 without any choice would be completed to dynamic batching.
    """
    if delay_us == NO_BATCHER:
        _clear_batcher(config)
        return
    config.dynamic_batching.SetInParent()
    config.dynamic_batching.max_queue_delay_microseconds = delay_us


def _clear_batcher(config: ModelConfigProto) -> None:
    """Take the batcher out, but for what does not batch: priorities, and queue policies that refuse or time out."""
    if not config.HasField("dynamic_batching"):
        return
    for field_ in ("preferred_batch_size", "max_queue_delay_microseconds"):
        config.dynamic_batching.ClearField(field_)
    if not config.dynamic_batching.ListFields():
        config.ClearField("dynamic_batching")
