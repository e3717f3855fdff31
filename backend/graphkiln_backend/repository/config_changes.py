"""Changes to a config.pbtxt that affect serving (instances, batching, parameters), but not what the model computes.

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

# Value of `queue_delay_us` that removes the dynamic batcher.
NO_BATCHER = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChanges:
    """Changes to apply; fields that are None are left unchanged.

    Attributes:
        parameters: Entries of `parameters`; an empty value removes the key.
        instances: Count of the only instance group.
        max_batch_size: New `max_batch_size`.
        queue_delay_us: Maximum queue delay of the dynamic batcher, in microseconds; `NO_BATCHER` removes the batcher,
            but keeps its queue policies.
        preferred_batch_sizes: Preferred batch sizes of the dynamic batcher.
        on_gpu: Use KIND_GPU for a new instance group if the configuration has none.
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
            RepositoryError: `instances` is given, but the configuration has several instance groups.
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

    Only comments at the head of the file are kept; callers save a copy of the original file and report it to the user.

    Args:
        path: The file; a missing file is an empty configuration.
        changes: The changes.

    Raises:
        RepositoryError: The file is not a model configuration, or the changes do not apply to it.
    """
    config = read_config(path)
    changes.apply(config)
    lines = path.read_text(encoding="utf-8-sig").splitlines() if path.exists() else []
    head = takewhile(lambda line: not line.strip() or line.startswith("#"), lines)
    comments = "\n".join(head).strip()
    return (f"{comments}\n" if comments else "") + text_format.MessageToString(config)


def has_one_group(config: ModelConfigProto) -> bool:
    """Return true if a configuration has at most one instance group."""
    return len(config.instance_group) <= 1


def _set_instances(config: ModelConfigProto, count: int, *, on_gpu: bool) -> None:
    if not has_one_group(config):
        raise RepositoryError(
            f"config.pbtxt of '{config.name}' has {len(config.instance_group)} instance groups",
            hint="leave the number of instances unchanged, or merge the groups into one",
        )
    if not config.instance_group:
        group = pb.ModelInstanceGroup
        config.instance_group.add(kind=group.KIND_GPU if on_gpu else group.KIND_CPU)
    config.instance_group[0].count = count


def _set_batch(config: ModelConfigProto, size: int) -> None:
    config.max_batch_size = size
    for warmup in config.model_warmup:
        warmup.batch_size = min(warmup.batch_size, max(1, size))  # 0 would disable the warm-up
    if config.HasField("dynamic_batching"):
        preferred = [each for each in config.dynamic_batching.preferred_batch_size if each <= size]
        config.dynamic_batching.preferred_batch_size[:] = preferred


def _set_delay(config: ModelConfigProto, delay_us: int) -> None:
    """Set the queue delay of the dynamic batcher, or remove the batcher."""
    if delay_us != NO_BATCHER:
        config.dynamic_batching.SetInParent()
        config.dynamic_batching.max_queue_delay_microseconds = delay_us
    elif config.HasField("dynamic_batching"):
        # Priorities and queue policies are kept: they also apply without batching.
        for field_ in ("preferred_batch_size", "max_queue_delay_microseconds"):
            config.dynamic_batching.ClearField(field_)
        if not config.dynamic_batching.ListFields():
            config.ClearField("dynamic_batching")
