"""Select the versions of the stores that are shown to Triton.

A failed version is quarantined until its files change, and replaced by the next older one that the version policy
allows. After a restart the server shows the same versions as before; new ones must be admitted first.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from graphkiln_backend.engines.hardware import gpus
from graphkiln_backend.graph.contract import CONTRACTS, Contracts
from graphkiln_backend.graph.errors import GraphkilnError, RepositoryError
from graphkiln_backend.graph.image_model import ACCEPT_IMAGES, IMAGE_MODEL
from graphkiln_backend.graph.text import bounded
from graphkiln_backend.repository.agreement import HINT
from graphkiln_backend.repository.batch_tensors import withhold_text_id
from graphkiln_backend.repository.config import (
    IDLE_CORES,
    ModelConfigProto,
    complete,
    guard_batch,
    read_config,
    select_versions,
)
from graphkiln_backend.repository.model_config import check_gpus
from graphkiln_backend.repository.overlay import GraphFolder, OtherBackend, backend_of, complete_config
from graphkiln_backend.repository.stores import StoredModel, scan_stores
from graphkiln_backend.repository.version import CONFIG_FILE, claims_proof, read_version_signature
from graphkiln_backend.server.image_models import add_image_models, complete_pair, configure
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.rollouts import Rollouts
from graphkiln_backend.triton.rollout_files import candidate_name

_log = logging.getLogger("graphkiln.server")

REWRITES_OFF_LEVEL = 2  # of `optimization.graph.level`
_PUBLIC_CHARACTERS = 400  # of a reason
_NVIDIA_DRIVER = Path("/dev/nvidiactl")


@dataclass(slots=True)
class Quarantine:
    """Failed versions with reasons and file stamps; a version with other files is not in quarantine."""

    _reasons: dict[tuple[str, int], tuple[str, str]] = field(default_factory=dict)

    def add(self, model: StoredModel, version: int, reason: str) -> None:
        """Quarantine a version until its files or its model's configuration change."""
        self._reasons[model.name, version] = (_files(model, version), reason)
        _log.error("%s version %d is not served: %s", model.name, version, reason)

    def reason(self, model: StoredModel, version: int) -> str:
        """Return the reason for the quarantine of a version with these files, or an empty string."""
        files, reason = self._reasons.get((model.name, version), ("", ""))
        return reason if files == _files(model, version) else ""

    def reasons(self, model: StoredModel) -> dict[int, str]:
        """Reasons of the quarantined versions of a model."""
        return {version: reason for version in model.versions if (reason := self.reason(model, version))}


def _files(model: StoredModel, version: int) -> str:
    return f"{model.stamp} {model.versions.get(version, '')}"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownModel:
    """A model in the mirror.

    Attributes:
        stored: State of its folder when it was shown.
        versions: The shown versions; empty if the model is refused.
        config: Their completed configuration; None to use the user's file.
        native: Their configuration for Triton's C++ backend, if that computes them; else None.
        other: True if they belong to another backend.
    """

    stored: StoredModel
    versions: tuple[int, ...] = ()
    config: ModelConfigProto | None = None
    native: ModelConfigProto | None = None
    other: bool = False

    @property
    def served_config(self) -> ModelConfigProto | None:
        """The configuration that Triton gets; None for the user's file."""
        return self.native or self.config

    @property
    def provable(self) -> tuple[int, ...]:
        """Versions to prove through the server: no instance of graphkiln computes them, and they have golden samples.

        A version of the native seat without any is refused by its proof: its files are incomplete.
        """
        if self.native is not None:
            return self.versions
        if not self.other:
            return ()
        return tuple(version for version in self.versions if claims_proof(self.stored.folder / str(version)))

    def shows_version(self, stored: StoredModel, version: int) -> bool:
        """True if the version is shown with the same files and configuration."""
        same = self.stored.stamp == stored.stamp and self.stored.versions.get(version) == stored.versions.get(version)
        return version in self.versions and same

    def shows(self, other: ShownModel) -> bool:
        """True if both show the same versions with the same files."""
        mine, theirs = self.stored, other.stored
        files = [mine.versions.get(version) for version in self.versions]
        return (
            self.versions == other.versions
            and mine.stamp == theirs.stamp
            and files == [theirs.versions.get(version) for version in other.versions]
            and self.native == other.native
        )


@dataclass(slots=True)
class ManagedStores:
    """The models of stores that are shown to Triton; kept across restarts of the server.

    Attributes:
        stores: The stores.
        quarantine: Failed versions.
        shown: The models in the mirror, by name, including those that failed to load; in explicit mode, the models that
            Triton has loaded or tried to load.
        mark: Adds faults to versions that were refused before the scan.
        backends: Names under which graphkiln's backend is installed.
        seat: Returns the configuration of versions for Triton's C++ backend, or None if graphkiln computes them.
        rollouts: Rollouts of new versions.
        must_be_native: Models whose settings ask for the C++ backend.
    """

    stores: Sequence[Path] = ()
    quarantine: Quarantine = field(default_factory=Quarantine)
    shown: dict[str, ShownModel] = field(default_factory=dict)
    mark: Callable[[dict[str, StoredModel]], dict[str, StoredModel]] = lambda found: found
    backends: frozenset[str] = frozenset()
    seat: Callable[[ModelConfigProto, Sequence[Path]], ModelConfigProto | None] = lambda _, __: None
    rollouts: Rollouts = field(default_factory=Rollouts)
    must_be_native: set[str] = field(default_factory=set)
    _graph_folder: GraphFolder | None = None
    _opened: bool = False
    _disagreeing: dict[str, dict[int, str]] = field(default_factory=dict)
    # Model and files that the C++ backend gets wrong, and those that it gets without ONNX Runtime's own rewrites.
    _not_native: set[tuple[str, str]] = field(default_factory=set)
    _without_rewrites: set[tuple[str, str]] = field(default_factory=set)
    _contracts: dict[str, dict[str, str]] = field(default_factory=dict)  # model -> version -> first digest

    def scan(self) -> dict[str, StoredModel]:
        """Scan the stores; add the models that take images if graphkiln completes configurations.

        Raises:
            OSError: A store cannot be listed.
        """
        found = self.mark(scan_stores(self.stores))
        return found if self._graph_folder is None else add_image_models(found)

    def open(self, mirror: Mirror, backends: frozenset[str], graph_folder: GraphFolder | None) -> bool:
        """Fill an empty mirror before the start of a server.

        Args:
            mirror: An empty mirror.
            backends: Names under which graphkiln's backend is installed.
            graph_folder: Finds the graph of a version; None to keep configurations unchanged.

        Returns:
            Whether every configuration in the mirror is complete.

        Raises:
            OSError: The stores cannot be listed, or the mirror cannot be written.
        """
        self.backends, self._graph_folder = backends, graph_folder
        for name, stored in self.scan().items():
            if before := self.shown.get(name):
                self.present(mirror, self.plan(stored, before.versions or stored.versions))
            elif not self._opened:
                self.present(mirror, self.plan(stored, stored.versions))
        self._opened = True
        return all(model.config or not model.versions for model in self.shown.values())

    @property
    def provable(self) -> bool:
        """True if a shown version has golden samples and is not computed by an instance of graphkiln."""
        return any(model.provable for model in [*self.shown.values()])  # a controller may add models

    def shows_all(self) -> bool:
        """True if there is at least one model, and each has a shown version."""
        return bool(self.shown) and all(model.versions for model in self.shown.values())

    def is_outdated(self, model: ShownModel) -> bool:
        """True if a model that takes images has other versions than the model that it belongs to."""
        tensor_model = self.shown.get(model.stored.tensor_model)
        return tensor_model is not None and tensor_model.versions != model.versions and not self._refused(model.stored)

    def plan(self, stored: StoredModel, versions: Iterable[int]) -> ShownModel:
        """Select the versions to show: those of the version policy that are not in quarantine.

        Versions whose configuration cannot be completed are quarantined; versions whose signature differs from that of
        newer ones are left out, and those that a rollout hides.

        Args:
            stored: The model.
            versions: The candidates; ignored for a model that takes images.
        """
        if stored.tensor_model:
            return self._plan_images(stored)
        for version, fault in stored.faults.items():
            if not self.quarantine.reason(stored, version):
                self.quarantine.add(stored, version, fault)
        left = set() if stored.problem else {*versions} & stored.versions.keys()
        left -= self.rollouts.hidden(stored.name, stored.folder).keys()
        while candidates := sorted(version for version in left if not self.quarantine.reason(stored, version)):
            blamed = candidates[-1]
            try:
                written = read_config(stored.folder / CONFIG_FILE)
                selected = tuple(select_versions(written, candidates))
                if not selected:
                    return ShownModel(stored=stored)
                blamed = selected[-1]
                check_gpus(written, has_gpu=bool(gpus()) or _NVIDIA_DRIVER.exists())
                planned = self._complete(stored, selected)
                config = planned.config
                misfits = {version: self._misfit(stored, version, config) for version in selected[:-1] if config}
            except (GraphkilnError, OSError) as error:
                self.quarantine.add(stored, blamed, str(error))
                continue
            except Exception as error:  # noqa: BLE001 - bad files of one model must not affect others
                _log.error("%s version %d cannot be read", stored.name, blamed, exc_info=error)
                self.quarantine.add(stored, blamed, f"{type(error).__name__}: {error}")
                continue
            disagreeing = {version: problem for version, problem in misfits.items() if problem}
            if not disagreeing:
                return planned
            for version, problem in disagreeing.items():
                reason = RepositoryError(f"newer versions have another signature: {problem}", hint=HINT)
                self.disagree(stored, version, str(reason))
            left -= disagreeing.keys()
        return ShownModel(stored=stored)

    def _complete(self, stored: StoredModel, versions: tuple[int, ...]) -> ShownModel:
        """Complete the configuration from the newest of some versions, and choose who computes them."""
        if self._graph_folder is None:
            return ShownModel(stored=stored, versions=versions, other=self.is_other(stored))
        try:
            config = complete_config(stored.folder, self.backends, self._graph_folder, versions[-1], versions)
        except OtherBackend:
            return ShownModel(stored=stored, versions=versions, other=True)
        complete_pair(config)
        native = None
        files = {(stored.name, _files(stored, version)) for version in versions}
        if self._keeps_contracts(config) and not files & self._not_native:
            native = self.seat(config, [stored.folder / str(version) for version in versions])
        if native is not None and files & self._without_rewrites:
            native.optimization.graph.level = REWRITES_OFF_LEVEL
        guard_batch(config)
        withhold_text_id(config)
        return ShownModel(stored=stored, versions=versions, config=config, native=native)

    def plan_candidate(self, stored: StoredModel, version: int, share: float = 0.0) -> ShownModel:
        """Complete the configuration of the candidate of a rollout, a separate model.

        Args:
            stored: The model.
            version: The version.
            share: Share of the traffic that it answers, which is its share of the model's instances; at least one. 0 is
                for the shadow: it takes the processor time that nothing else needs.

        Raises:
            GraphkilnError, OSError: The version cannot be tried; the message says why.
        """
        if self._graph_folder is None:
            raise RepositoryError("configurations are not completed", hint="leave --disable-auto-complete-config out")
        config = complete_config(stored.folder, self.backends, self._graph_folder, version, (version,))
        kinds = {"sequence_batching": "sequences", "model_transaction_policy": "decoupled transactions"}
        for field_name, words in kinds.items():
            if config.HasField(field_name):
                raise RepositoryError(f"a rollout cannot try a model with {words}: its requests depend on others")
        if config.batch_input or config.batch_output or any(tensor.allow_ragged_batch for tensor in config.input):
            raise RepositoryError("a rollout cannot try a model with batch_input, batch_output or ragged batches")
        guard_batch(config)
        withhold_text_id(config)
        config.name = candidate_name(stored.name)
        for key in (ACCEPT_IMAGES, IMAGE_MODEL, IDLE_CORES):
            config.parameters.pop(key, None)
        if not share:
            config.parameters[IDLE_CORES].string_value = "true"
        config.ClearField("version_policy")
        if not config.instance_group:
            config.instance_group.add()
        instances = sum(max(1, group.count) for group in config.instance_group)
        del config.instance_group[1:]
        config.instance_group[0].count, config.instance_group[0].name = max(1, math.ceil(share * instances)), ""
        return ShownModel(stored=stored, versions=(version,), config=config)

    def _keeps_contracts(self, config: ModelConfigProto) -> bool:
        """False if a version number has had another contract, in this run of the supervisor.

        A client may still hold that contract, and only an instance of graphkiln refuses its requests: Triton's C++
        backend ignores the contract that a request names, and the client recognizes another version by its number.
        """
        if CONTRACTS not in config.parameters:
            return True
        digests = Contracts.from_json(config.parameters[CONTRACTS].string_value).versions
        first = self._contracts.setdefault(config.name, {})
        return all(first.setdefault(version, digest) == digest for version, digest in digests.items())

    def is_other(self, stored: StoredModel) -> bool:
        """True if the configuration of a model names another backend than graphkiln's."""
        return backend_of(read_config(stored.folder / CONFIG_FILE), self.backends) not in self.backends

    def _misfit(self, stored: StoredModel, version: int, config: ModelConfigProto) -> str:
        """Describe how the graph of a version contradicts a configuration; empty if it does not."""
        if self._graph_folder is None:
            return ""
        try:
            graph = self._graph_folder(stored.folder / str(version))
            signature = read_version_signature(graph, config.default_model_filename)
        except (GraphkilnError, OSError):  # reported when it is loaded
            return ""
        fitted = ModelConfigProto()
        fitted.CopyFrom(config)
        try:
            complete(fitted, signature, labels_file=None)
        except RepositoryError as error:
            return error.message
        return ""

    def _plan_images(self, stored: StoredModel) -> ShownModel:
        """Select for a model that takes images the shown versions of the model that it belongs to."""
        tensor_model = self.shown.get(stored.tensor_model)
        if tensor_model is None or not tensor_model.versions or self._refused(stored):
            return ShownModel(stored=stored)
        try:
            if tensor_model.config is None:
                where = f"parameters: {ACCEPT_IMAGES} of '{stored.tensor_model}'"
                raise RepositoryError(f"{where}: the model is of another backend", hint=f"remove {ACCEPT_IMAGES}")
            config = configure(tensor_model.config)
        except GraphkilnError as error:
            for version in tensor_model.versions:
                self.quarantine.add(stored, version, str(error))
            return ShownModel(stored=stored)
        return ShownModel(stored=stored, versions=tensor_model.versions, config=config)

    def _refused(self, stored: StoredModel) -> bool:
        return bool(stored.problem or self.quarantine.reasons(stored))

    def disagree(self, stored: StoredModel, version: int, reason: str) -> None:
        """Record and log, once, that a version has another signature than those that serve."""
        known = self._disagreeing.setdefault(stored.name, {})
        if known.get(version) != reason:
            _log.error("%s version %d is not served: %s", stored.name, version, reason)
        known[version] = reason

    def present(self, mirror: Mirror, model: ShownModel) -> None:
        """Show a model in the mirror; without a version, a placeholder whose load fails with the reason.

        Raises:
            OSError: The mirror cannot be written.
        """
        stored = model.stored
        if not model.versions:
            reasons = self.reasons(stored)
            mirror.refuse(stored.name, reasons)
            for version in reasons.keys() - self.quarantine.reasons(stored).keys():
                _log.error("%s version %d is not served: %s", stored.name, version, reasons[version])
        elif stored.tensor_model and model.config is not None:
            mirror.show_images(stored.name, stored.folder, model.versions, model.config)
        else:
            mirror.show(stored.folder, model.versions, model.served_config)
        self.shown[stored.name] = model

    def refuse(self, model: ShownModel, version: int, reason: str, *, was_proven: bool = False) -> None:
        """Quarantine a version that is not right; or have graphkiln compute it, if only its seat was chosen for it.

        If its settings ask for the native seat, it is tried once more without ONNX Runtime's own rewrites, which may
        break a graph.

        Args:
            model: The model.
            version: The version.
            reason: Result of its proof.
            was_proven: It passed a proof with this configuration before.
        """
        name, files = model.stored.name, (model.stored.name, _files(model.stored, version))
        if model.native is None or name in self.must_be_native:
            are_off = model.native is None or model.native.optimization.graph.level == REWRITES_OFF_LEVEL
            if are_off or was_proven or files in self._without_rewrites:
                self.quarantine.add(model.stored, version, reason)
                return
            self._without_rewrites.add(files)
            _log.warning(
                "%s version %d failed in the C++ backend, so ONNX Runtime's own rewrites are off "
                "(optimization.graph.level: %d): %s", name, version, REWRITES_OFF_LEVEL, reason
            )  # fmt: skip
            return
        self._not_native.add(files)
        _log.warning(
            "%s version %d is computed by graphkiln, because the C++ backend failed: %s", name, version, reason
        )

    def reasons(self, stored: StoredModel) -> dict[int, str]:
        """Return the reasons why versions of a model are not served, by version."""
        reasons = self.quarantine.reasons(stored)
        if stored.problem or not reasons:
            newest = max(stored.versions, default=1)
            nothing = "the version policy of its config.pbtxt selects no version"
            if stored.tensor_model:
                nothing = f"no version of '{stored.tensor_model}' is served"
            reasons = {newest: stored.problem or nothing}
        return reasons

    def public_refusals(self) -> dict[tuple[str, str], str]:
        """Return `refusals` without the paths of the stores, for the metrics port, which needs no key."""
        found = self.refusals()
        for name, version in found:
            store = self.shown[name].stored.folder.parent
            found[name, version] = bounded(found[name, version].replace(f"{store}/", ""), _PUBLIC_CHARACTERS)
        return found

    def refusals(self) -> dict[tuple[str, str], str]:
        """Return the reasons why versions are not served, by model and version."""
        found: dict[tuple[str, str], str] = {}
        for name, model in [*self.shown.items()]:  # a controller may add models
            reasons = self.quarantine.reasons(model.stored) if model.versions else self.reasons(model.stored)
            others = self._disagreeing.get(name, {})
            reasons |= {version: reason for version, reason in others.items() if version not in model.versions}
            hidden = self.rollouts.hidden(name, model.stored.folder)
            reasons |= {version: reason for version, reason in hidden.items() if version in model.stored.versions}
            found |= {(name, str(version)): reason for version, reason in reasons.items()}
        return found
