"""Serve a bare graph like a repository of Triton's C++ backend, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from fake_triton import InferenceRequest
from lowered import cpu

from graphkiln_backend.cache.store import ArtifactCache
from graphkiln_backend.lowering.deployment import Deployment
from graphkiln_backend.lowering.proven_session import ProvenSession
from graphkiln_backend.repository.config import ModelConfigProto, complete, read_config
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.version import read_version_signature
from graphkiln_backend.triton.executor import Executor, Outputs


@dataclass(frozen=True, kw_only=True, slots=True)
class DropIn:
    """A graph that is served."""

    config: ModelConfigProto
    proven: ProvenSession
    executor: Executor

    def ask(self, *requests: dict[str, np.ndarray]) -> list[Outputs]:
        """Outputs of concurrent requests."""
        names = [spec.name for spec in self.proven.session.signature.outputs]
        results = self.executor.execute_batch([InferenceRequest(feeds, names) for feeds in requests])
        for result in results:
            assert isinstance(result, dict), result
        return [result for result in results if isinstance(result, dict)]


@contextmanager
def drop_in(folder: Path, model: onnx.ModelProto, config_text: str = "") -> Iterator[DropIn]:
    """Serve a graph with or without a config.pbtxt."""
    version = folder / "store" / "m" / "1"
    version.mkdir(parents=True)
    onnx.save(model, version / "model.onnx")
    (version.parent / "config.pbtxt").write_text(config_text)
    config = read_config(version.parent / "config.pbtxt")
    complete(config, read_version_signature(version, config.default_model_filename), labels_file=None)
    model_config = ModelConfig.from_protobuf(config, has_gpu=False)
    with ArtifactCache(folder / "cache", lasting=False) as cache:
        proven = Deployment.read(version, model_config, cpu()).build(cache)
        with proven.session:
            executor = Executor(
                proven.session,
                batching=config.max_batch_size > 0,
                input_ranks=model_config.input_ranks,
                separate=proven.separate,
            )
            yield DropIn(config=config, proven=proven, executor=executor)
