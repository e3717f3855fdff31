"""Changes of a configuration that say how a model is served, and nothing about what it computes.

Everything else stays as it is: tensors, labels, version policy, warm-up, what is published for clients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from google.protobuf import json_format, text_format

from graphkiln_backend.graph.errors import RepositoryError
from graphkiln_backend.repository.config import ModelConfigProto, pb, read_config
from graphkiln_backend.repository.pbtxt_edits import edited_text

NO_BATCHER = -1
"""As a queue delay: no dynamic batcher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConfigChanges:
    """What is changed; None leaves a field as it is.

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
        """Changes a configuration in place.

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
    """The text of a config.pbtxt after changes: what does not change stays as it was written, comments included.

    Where it cannot be edited so, it is written anew, and of the comments only those at its head stay.

    Args:
        path: The file; a missing one is an empty configuration.
        changes: What to change.

    Raises:
        RepositoryError: The file is not a model configuration, or cannot be changed so.
    """
    config = read_config(path)
    changed = pb.ModelConfig()
    changed.CopyFrom(config)
    changes.apply(changed)
    try:
        return edited_text(_text_of(path), config, changed)
    except (ValueError, KeyError, text_format.ParseError):
        return _head(path) + text_format.MessageToString(changed)


def changed_document(document: Mapping[str, object], changes: ConfigChanges) -> dict[str, object]:
    """A configuration as a server shows it, after changes: JSON with the protobuf's own field names.

    Args:
        document: As served; not changed.
        changes: What to change.

    Raises:
        RepositoryError: It cannot be changed so.
    """
    config = json_format.ParseDict(dict(document), pb.ModelConfig(), ignore_unknown_fields=True)
    changes.apply(config)
    return as_document(config)


def as_document(config: ModelConfigProto) -> dict[str, object]:
    """A configuration as JSON with the protobuf's own field names, as a server shows it."""
    return dict(json_format.MessageToDict(config, preserving_proto_field_name=True))


def has_one_group(config: ModelConfigProto) -> bool:
    """Whether the number of instances is one number."""
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
    """Takes the batcher out, but for what does not batch: priorities, and queue policies that refuse or time out."""
    if not config.HasField("dynamic_batching"):
        return
    for field_ in ("preferred_batch_size", "max_queue_delay_microseconds"):
        config.dynamic_batching.ClearField(field_)
    if not config.dynamic_batching.ListFields():
        config.ClearField("dynamic_batching")


def _text_of(path: Path) -> str:
    """As it stands in the file, with the ends of its lines; nothing where there is no file."""
    return path.read_bytes().decode("utf-8-sig") if path.exists() else ""


def _head(path: Path) -> str:
    """The comments that a file begins with."""
    if not path.exists():
        return ""
    lines = []
    for line in path.read_text(encoding="utf-8-sig").splitlines():
        if line.strip() and not line.startswith("#"):
            break
        lines.append(line)
    return "\n".join(lines).strip() + "\n" if any(map(str.strip, lines)) else ""
