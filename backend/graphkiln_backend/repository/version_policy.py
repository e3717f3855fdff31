"""Which versions of a model a configuration wants served. Source: Triton, "Model Configuration", version policy."""

from __future__ import annotations

from collections.abc import Iterable

from graphkiln_backend.repository.config import ModelConfigProto


def select_versions(config: ModelConfigProto, versions: Iterable[int]) -> list[int]:
    """The versions to serve, in ascending order.

    Args:
        config: The model's configuration; without a policy, the newest version is served.
        versions: Those that can be served.
    """
    ordered = sorted(versions)
    policy = config.version_policy
    match policy.WhichOneof("policy_choice"):
        case "all":
            return ordered
        case "specific":
            return [version for version in ordered if version in set(policy.specific.versions)]
        case _:
            return ordered[-max(1, policy.latest.num_versions) :]
