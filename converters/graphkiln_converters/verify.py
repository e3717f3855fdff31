"""Prove a written version again: on another engine, another release, or more samples."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphkiln_backend.engines.base import REWRITES_OFF, Placement, Session, SessionConfig, SessionTuning
from graphkiln_backend.engines.registry import REFERENCE_ENGINE, load_engine, open_reference, reference_engine
from graphkiln_backend.graph.device import CPU
from graphkiln_backend.graph.errors import (
    EngineUnavailable,
    ExecutionError,
    GraphkilnError,
    LoweringError,
    VerificationError,
)
from graphkiln_backend.graph.manifest import Verification
from graphkiln_backend.graph.precision import Precision
from graphkiln_backend.proof.comparison import prove
from graphkiln_backend.proof.policy import EXPORT, REPLAY, Limits, adopted_limits, beside_reference
from graphkiln_backend.repository.config import complete, read_config
from graphkiln_backend.repository.publication import check_published, publish
from graphkiln_backend.repository.version import CONFIG_FILE, ModelVersion
from graphkiln_backend.repository.version_folders import is_version
from graphkiln_converters.prove import REPLAYED_SIZES, replay_golden, with_own_limit
from graphkiln_converters.samples import each_sample, read_samples
from graphkiln_converters.sources.base import USUAL_SIZE, InputSpec, run_in_batches

# Suffixes of graphs that an engine here can run.
READABLE = (".onnx", ".xml")
_MOST_READ = 256

_log = logging.getLogger("graphkiln.converters")


@dataclass(frozen=True, kw_only=True, slots=True)
class Verified:
    """Verdicts, and the placement of the nodes.

    Attributes:
        verdicts: Verdict for each reference.
        placement: Executed nodes as reported by the engine; None without golden samples.
    """

    verdicts: tuple[Verification, ...]
    placement: Placement | None


def check_publication(version: ModelVersion) -> None:
    """Check a version in a model's folder against the model's configuration and its other versions.

    Raises:
        RepositoryError: It contradicts the model's config.pbtxt or another version.
    """
    folder = version.graph_path.parent
    if version.manifest is None or not is_version(folder.name):
        return
    config = read_config(folder.parent / CONFIG_FILE)
    config.name = config.name or folder.parent.name
    complete(config, version.manifest.signature, labels_file=None)
    publish(config, folder.parent, [int(folder.name)])
    check_published(config, folder.parent, int(folder.name), version)


def verify(
    version: ModelVersion,
    *,
    engine: str,
    precision: Precision | None,
    samples: Path | None,
    threads: int,
    tuning: SessionTuning | None = None,
    op_libraries: tuple[str, ...] = (),
) -> Verified:
    """Run a version's graph on an engine and compare it with its references.

    If it fails on ONNX Runtime, it is run once more without ONNX Runtime's own rewrites, as a server does.

    Args:
        version: The version to prove.
        engine: Name in the registry; empty for the one whose outputs are the reference for graphs of this format.
        precision: As for `verify_session`.
        samples: As for `verify_session`.
        threads: Threads of the engine.
        tuning: Tuning of the sessions of a server, such as the level of rewrites; None for the default.
        op_libraries: Libraries of custom operators.

    Raises:
        VerificationError: As for `verify_session`.
        RepositoryError: It contradicts its model's config.pbtxt.
        EngineUnavailable: The engine is not installed or cannot run here.
        ConversionError: The samples cannot be read.
    """
    check_publication(version)
    if version.graph_path.suffix not in READABLE:
        raise VerificationError(
            f"{version.graph_path} cannot be verified here",
            report="no engine of graphkiln reads it",
            hint="graphkiln serve proves it by its own backend before it answers"
            if version.golden
            else "it is unproven: graphkiln adopt adds golden samples",
        )
    engine = engine or reference_engine(version.graph_path)
    config = SessionConfig(
        engine=engine,
        device=CPU,
        threads=threads,
        spin=False,
        reason="requested by verify",
        tuning=tuning or SessionTuning(),
        op_libraries=op_libraries,
    )
    loaded = load_engine(engine)
    support = loaded.probe(CPU)
    if not support.ok:
        raise EngineUnavailable(support.reason)

    def verify_built(config: SessionConfig) -> Verified:
        with loaded.build(version.graph_path, config) as session:
            placement = session.placement(version.golden.inputs) if version.golden else None
            verdicts = verify_session(version, session, engine, precision=precision, samples=samples)
        return Verified(verdicts=verdicts, placement=placement)

    try:
        return verify_built(config)
    except (ExecutionError, LoweringError, VerificationError) as error:  # a server tries it once more, too
        if engine != REFERENCE_ENGINE or config.tuning.graph_level == "off":
            raise
        try:
            verified = verify_built(config.without_rewrites())
        except GraphkilnError:
            raise error from None
        _log.warning("%s: %s", REWRITES_OFF, error)
        return verified


def verify_session(
    version: ModelVersion, session: Session, name: str, *, precision: Precision | None, samples: Path | None
) -> tuple[Verification, ...]:
    """Compare the outputs of a session with the references of a version.

    Golden samples are compared with the outputs of the source model (row of the precision) and of the saved graph
    (replay), those of an adopted version with its reference. A user's samples are compared with the reference engine
    without optimizations.

    Args:
        version: The version.
        session: Session to prove; stays open.
        name: Name of the session, for the verdicts.
        precision: Row of the policy; None for the saved precision.
        samples: Further samples, a folder of images or an .npz, or None.

    Returns:
        A verdict for each reference.

    Raises:
        VerificationError: The outputs changed, or there is no reference.
        ConversionError: The samples cannot be read.
    """
    made = version.manifest and (version.manifest.conversion or version.adoption)
    row = precision or (made.precision if made else Precision.FP32)
    conversion = version.manifest and version.manifest.conversion
    own_limit = conversion.recipe.get("relative_l2") if conversion and row is conversion.precision else None
    verdicts: list[Verification] = []
    if golden := version.golden:
        # Another engine than that of the golden outputs rounds differently, also in fp32.
        references = [
            ("source model", golden.source_outputs, with_own_limit(beside_reference(row), own_limit)),
            ("saved graph", golden.graph_outputs, REPLAY[row]),
        ]
        if version.adoption:
            limits = adopted_limits(replace(version.adoption, precision=row))
            references = [(version.adoption.reference, golden.graph_outputs, limits)]
        named = [
            (trusted, replace(limits, name=f"{row} on {name}, {reference}"))
            for reference, trusted, limits in references
        ]
        verdicts = replay_golden(session, golden, named, reading=version.reading)
    if samples:
        verdicts.append(
            _compare_samples(version, session, samples, replace(REPLAY[row], name=f"{row} on {name}, your samples"))
        )
    if not verdicts:
        raise VerificationError(
            f"{version.graph_path.parent} cannot be verified",
            report="it has no golden samples",
            hint="give samples (--samples DIR), or convert it: graphkiln convert FILE.onnx",
        )
    return tuple(verdicts)


def _compare_samples(version: ModelVersion, session: Session, path: Path, limits: Limits) -> Verification:
    """Verdict on a user's samples against the reference engine; the worst one of whole samples."""
    preprocess = version.manifest.preprocess if version.manifest else None
    whole = version.golden is not None and version.golden.whole
    first = 0 if whole else 1  # first dimension of a sample
    inputs = {
        spec.name: InputSpec(
            name=spec.name,
            dtype=spec.dtype,
            shape=tuple(dim if isinstance(dim, int) else USUAL_SIZE for dim in spec.shape[first:]),
        )
        for spec in session.signature.inputs
    }
    feeds = read_samples(path, inputs, preprocess, _MOST_READ)
    with open_reference(version.graph_path) as reference:
        if whole:
            verdicts = [
                prove(reference.run(one), session.run(one), limits, batch_sizes=(), reading=version.reading, samples=1)
                for one in each_sample(feeds)
            ]
            return max(verdicts, key=lambda verdict: verdict.relative_l2)
        size = max(REPLAYED_SIZES)
        trusted, found = (run_in_batches(each.run, feeds, size) for each in (reference, session))
    scores = [np.abs(array) for array in trusted.values() if array.dtype.kind == "f"]
    largest = max((float(np.max(array, initial=0.0, where=np.isfinite(array))) for array in scores), default=0.0)
    noise = largest * EXPORT.relative_l2
    return prove(trusted, found, limits, batch_sizes=(size,), noise=noise, reading=version.reading)
