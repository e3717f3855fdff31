"""Start tritonserver: command line, environment, process."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.lowering.seat import choose_seat, find_native_backend, native_config
from graphkiln_backend.repository.config import DROP_IN_BACKEND, NATIVE, SEAT, ModelConfigProto, write_config
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.flags import ControlMode, TritonFlags
from graphkiln_backend.server.image_models import ExplicitImages
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.limits import (
    SharedMemoryPlan,
    check_instances,
    default_limit,
    free_shared_memory,
    plan_shared_memory,
    pool_size,
)
from graphkiln_backend.server.log import NoiseFilter
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror
from graphkiln_backend.server.proofs import ProofBook
from graphkiln_backend.server.repository_control import RepositoryControl
from graphkiln_backend.server.rollouts import Rollouts
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.store_copies import StoreCopies
from graphkiln_backend.server.version_control import VersionController, brief
from graphkiln_backend.system.processes import end_with_parent, start
from graphkiln_backend.triton.deadly_requests import DeadlyRequests
from graphkiln_backend.triton.environment import DEFAULT_REPLAY_INTERVAL_S, Overrides, RecordSettings, to_environment
from graphkiln_backend.triton.features import VERSION_VARIABLE

if TYPE_CHECKING:
    from graphkiln_backend.server.admission import Verdict
    from graphkiln_backend.server.golden_requests import Asking
    from graphkiln_backend.server.rollout_loop import RolloutController
    from graphkiln_backend.server.served_proofs import ServedProofs

_log = logging.getLogger("graphkiln.server")

# Reasons that another try does not change; others may be a lack of memory, or a killed process.
_REFUSALS = re.compile("TritonModelException|Invalid argument")
_LOAD_MARGIN_S = 30.0  # after the load deadline, at which the instance is killed and its load fails
_NVIDIA_DRIVER = Path("/dev/nvidiactl")
# Let glibc keep request buffers. By default it returns large ones to the kernel, which clears every page again: 8% of
# the time of a 600 kB request, 10% of the throughput of a busy server. The user's variables win. Source: mallopt(3).
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
_BACKEND_FLAGS = ("backend-config", "host-policy", "cuda-memory-pool-byte-size", "pinned-memory-pool-byte-size")
_REQUEST_FLAG, _USUAL_REQUEST_BYTES = "http-max-input-size", 64 << 20
_LOAD_FLAG = "--load-model"
_ALL_MODELS = "*"

# Readiness that survives upgrades.
#
# Triton's readiness (24.10) is chosen at the start. Strict, it is "no" while a new version number loads, although the
# older version answers; not strict, it is "yes" even if a model has no version. So the server first starts not strict,
# with --exit-on-error: it exits before it opens a port if anything cannot be loaded, so that every model has a version
# when it is live. If it exits, it is restarted strict and serves the other models, not ready.
#
#     start          it exits with an error before it is live      any other end
#     not strict     next start: strict, with a part               next start: not strict
#     strict         a fault; for the first server, the end        next start: not strict
#
# Starts are strict, too, while a model is known to be bad. A start without a model (explicit mode) is not strict: loads
# that fail are reported to the client that asked for them. The user's own flags are never overridden.

# Overrides `--exit-on-error=false` of `ControlMode.before_flags`: the last flag counts.
_NOT_STRICT = "--strict-readiness=false"
_ALL_OR_NOTHING_FLAGS = (_NOT_STRICT, "--exit-on-error=true")


@dataclass(slots=True)
class Readiness:
    """Kind of readiness of the next server; kept across restarts.

    Attributes:
        whole: Whether the last server was started to serve all models or none.
        strict: Whether one failed version makes it not ready.
        endless: Versions that exceeded the load deadline, added by the watchdog. The next server, which serves the
            others, does not load them again. Cleared once a server is live (by the supervisor), and before a start that
            does not follow such a failure (`choose`).
        refused: Versions that the last server could not load because of their files, with the reasons. The next server
            does not load them again.
        log: Output of the last server.
    """

    whole: bool = False
    strict: bool = True
    endless: set[str] = field(default_factory=set)
    refused: dict[tuple[str, int], str] = field(default_factory=dict)
    log: NoiseFilter | None = None
    _failed: bool = False

    def choose(self, flags: TritonFlags, *, loads: bool, idle: bool = False) -> None:
        """Choose for the next start.

        Args:
            flags: The user's flags.
            loads: It loads models, and none is known to be bad.
            idle: It loads no model.
        """
        asked = {"strict-readiness", "exit-on-error"} & flags.values.keys()
        self.whole = loads and not asked and not self._failed
        self.strict = not self.whole and not (idle and not asked)
        if not self._failed:
            self.endless.clear()
        self._failed = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments that precede the user's."""
        if self.whole:
            return _ALL_OR_NOTHING_FLAGS
        return () if self.strict else (_NOT_STRICT,)

    def fall_back(self) -> bool:
        """Return true if a server that exited before it was live may serve a part of its models after a restart."""
        self._failed = self.whole
        if self.log:
            self.log.wait()  # it may name the reason
        return self.whole


@dataclass(slots=True)
class LoadedModels:
    """The loaded models in explicit mode, to be loaded again after a restart.

    Attributes:
        names: None before the first server was live.
    """

    names: Sequence[str] | None = None

    def arguments(self, typed: Sequence[str], found: Collection[str] = ()) -> list[str]:
        """Replace `--load-model` in the user's arguments by the models that were loaded last.

        Args:
            typed: The user's arguments.
            found: The models of the stores, which replace `*`: Triton would treat every folder as a model.
        """
        every = _named_models(typed) == [_ALL_MODELS]
        models = found if self.names is None and every else self.names
        if models is None:
            return list(typed)
        words = iter(typed)
        kept = []
        for word in words:
            if word == _LOAD_FLAG:
                next(words, None)
            elif not word.startswith(f"{_LOAD_FLAG}="):
                kept.append(word)
        return [*kept, *(f"{_LOAD_FLAG}={model}" for model in models)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Configuration of a server, and the state that is kept across its restarts.

    Attributes:
        installation: The tritonserver to run.
        stores: Model stores.
        flags: Flags of tritonserver: the user's, except for the addresses that the edge or the supervisor serves.
        overrides: Settings of the command line, by model.
        cache: The artifact cache.
        replace_onnxruntime: Whether graphkiln's backend replaces an installed C++ `onnxruntime` backend.
        access: Endpoints that need the admin key.
        load_deadline_s: Time limit for the proof of a new version.
        replay_interval_s: Seconds between replays of the golden samples; 0 for none.
        memory_bytes: Memory limit of tritonserver without its instances; 0 for half of the free memory.
        copies: Stores that are served from a copy.
        prove_memory_bytes: Versions are proven together before they are shown if they are not larger together.
        record: Settings of recorded requests, or None.
        proofs: Results of proofs through a server.
        state: Folder of the state of rollouts; None for no rollouts.
        managed: The models shown to Triton, filled by `prepare`; kept across restarts, like the following.
        loaded: The loaded models in explicit mode.
        readiness: The kind of readiness.
        deadly: Requests that have ended instances.
    """

    installation: Installation
    stores: Sequence[Path]
    flags: TritonFlags
    overrides: Overrides = field(default_factory=dict)
    cache: CacheSettings = field(default_factory=CacheSettings)
    replace_onnxruntime: bool = False
    access: Access = field(default_factory=Access)
    load_deadline_s: float = 600.0
    replay_interval_s: float = DEFAULT_REPLAY_INTERVAL_S
    memory_bytes: int = 0
    copies: StoreCopies = field(default_factory=StoreCopies)
    prove_memory_bytes: int = 4 << 30
    record: RecordSettings | None = None
    proofs: ProofBook = field(default_factory=ProofBook)
    state: Path | None = None
    managed: ManagedStores = field(default_factory=ManagedStores)
    loaded: LoadedModels = field(default_factory=LoadedModels)
    readiness: Readiness = field(default_factory=Readiness)
    deadly: DeadlyRequests = field(default_factory=DeadlyRequests)

    def prepare(self, folder: RunFolder) -> list[str]:
        """Fill an empty run folder; takes seconds if graphs must be converted.

        Returns:
            The command line for `start`.

        Raises:
            ServerSetupError: The backends cannot be assembled, or there is too little shared memory or too few threads.
        """
        backends = folder.assemble_backends(
            self.installation, self.flags.backends, replace_onnxruntime=self.replace_onnxruntime
        )
        self.managed.stores = stores = folder.link_stores(self.stores)
        self.managed.mark, self.managed.backends = self.copies.mark, backends
        if self.state and not self.managed.rollouts.folders:
            self.managed.rollouts = Rollouts.of(self.state, self.stores, self.copies.sources)
        self.managed.rollouts.look()
        self.deadly.publish(folder.instances)
        mode, flags, loads, idle, complete = ControlMode.read(self.flags), self.flags, False, False, False
        try:
            if mode.managed:
                mirror = Mirror(folder.overlay)
                self.managed.seat = partial(self._choose_seat, backends)
                for (name, version), reason in sorted(self.readiness.refused.items()):
                    shown = self.managed.shown[name]
                    self.managed.quarantine.add(shown.stored, version, reason)
                    self.managed.shown[name] = replace(shown, versions=())  # an older one may be shown
                with self.cache.open(folder.shared / "artifacts") as cache:
                    convert = partial(convert_if_needed, cache=cache, in_subprocess=True)
                    complete = self.managed.open(mirror, backends, convert if mode.completes else None)
                self._prove_before_start(folder, mirror)
                stores, loads = [mirror.path], self.managed.shows_all()
            elif mode.name == "explicit" and self.control():
                found = self.managed.scan()
                stores = [*stores, _image_mirror(folder).path]
                flags = replace(flags, arguments=tuple(self.loaded.arguments(flags.arguments, found)))
                loads, idle = may_all_load(flags.arguments, found), not _named_models(flags.arguments)
        except OSError as error:
            raise ServerSetupError(f"cannot mirror the model stores: {error}", hint="can they be read?") from error
        self.readiness.choose(flags, loads=loads, idle=idle)
        memory = plan_shared_memory(stores if complete else (), free_bytes=free_shared_memory())
        check_instances(memory.instances)
        line = command_line(
            self.installation, folder, stores, flags, memory, complete=complete, readiness=self.readiness.arguments
        )
        return [*line, *self.access.arguments]

    def _note_failed(self, mirror: Path, model: str, version: int, reason: str) -> None:
        """Note a version that a starting server cannot load, unless another try may succeed."""
        shown = self.managed.shown.get(model)
        if shown and version in shown.versions and _REFUSALS.search(reason):
            self.readiness.refused[model, version] = brief(reason, mirror / model, shown.stored.folder)

    def first_replay(self, folder: RunFolder) -> AbstractContextManager[Asking | None]:
        """Begin to replay golden samples of what no instance of graphkiln computes, once the server is live."""
        models = [model for model in self.managed.shown.values() if model.provable]
        managed = ControlMode.read(self.flags).managed
        return self._served_proofs(folder).ask_once_live(models) if models and managed else nullcontext()

    def version_controller(self, folder: RunFolder, first_replay: Asking | None = None) -> VersionController | None:
        """Create the version controller of a live server; None if Triton controls the versions.

        Args:
            folder: The run folder.
            first_replay: See `first_replay`.
        """
        mode, control = ControlMode.read(self.flags), self.control()
        if control is None or not (mode.managed or mode.name == "explicit"):
            return None
        load_timeout_s = self.load_deadline_s + _LOAD_MARGIN_S
        images = None
        if not mode.managed:
            images = ExplicitImages(
                stores=self.managed.stores,
                mirror=_image_mirror(folder),
                control=control,
                load_timeout_s=load_timeout_s,
            )
        return VersionController(
            mode=mode,
            stores=self.managed,
            mirror=Mirror(folder.overlay),
            control=control,
            instances=folder.instances,
            admit=partial(self._admit, folder.temporary),
            load_timeout_s=load_timeout_s,
            copies=self.copies,
            images=images,
            on_loaded=partial(setattr, self.loaded, "names"),
            proofs=self._served_proofs(folder),
            first_replay=first_replay,
            replay_interval_s=self.replay_interval_s,
            strict=self.readiness.strict,
        )

    def rollout_controller(self, folder: RunFolder, versions: VersionController) -> RolloutController | None:
        """Create the controller of the rollouts of a live server; None if there can be none.

        Args:
            folder: The run folder.
            versions: Its version controller.
        """
        control = self.control()
        if control is None or not self.managed.rollouts.folders:
            return None
        from graphkiln_backend.server.rollout_loop import RolloutController

        return RolloutController(
            stores=self.managed,
            mirror=Mirror(folder.overlay),
            control=control,
            instances=folder.instances,
            admit=partial(self._admit, folder.temporary),
            refresh=versions.refresh,
            managed=ControlMode.read(self.flags).managed,
            load_timeout_s=self.load_deadline_s + _LOAD_MARGIN_S,
            http=None if self.flags.shares("http") else self.flags.listen_address("http"),
            most_bytes=self._most_request_bytes(),
        )

    def _most_request_bytes(self) -> int:
        """Size of the largest HTTP request that Triton takes; 0 for any, as before it had a flag for that."""
        if _REQUEST_FLAG not in self.installation.flags:
            return 0
        text = self.flags.values.get(_REQUEST_FLAG, "")
        return int(text) if text.isdecimal() else _USUAL_REQUEST_BYTES

    def _choose_seat(
        self, backends: frozenset[str], config: ModelConfigProto, versions: Sequence[Path]
    ) -> ModelConfigProto | None:
        """Return the configuration of versions for Triton's C++ backend, or None if graphkiln computes them."""
        folders = [folder for folder in (self.flags.backends, self.installation.backends) if folder]
        backend = None if DROP_IN_BACKEND in backends else find_native_backend(folders)
        overrides = self.overrides.get(config.name, ())
        needed = "a rollout compares its answers" if self.managed.rollouts.is_running(config.name) else ""
        seat = choose_seat(config, versions, overrides, backend, recorded=self.record is not None, needed=needed)
        if not seat.native:
            return None
        if seat.requested:
            self.managed.must_be_native.add(config.name)
        if self.record:
            _log.warning("requests of '%s' are not recorded: seat: native is set", config.name)
        native = native_config(config, versions, overrides)
        native.parameters[SEAT].string_value = NATIVE  # for clients, and for `batch_footprints`
        return native

    def _prove_before_start(self, folder: RunFolder, mirror: Mirror) -> None:
        """Prove what no instance of graphkiln computes, and replace wrong versions by older ones.

        Raises:
            ServerSetupError: No second server can be started.
            OSError: The mirror cannot be written.
        """
        proven: set[tuple[str, int]] = set()
        while todo := [
            (model, version)
            for name, model in self.managed.shown.items()
            for version in model.provable
            if (name, version) not in proven
        ]:
            try:
                verdicts = self._served_proofs(folder).admit(todo)
            except OSError as error:
                raise ServerSetupError(
                    f"cannot prove versions of other backends in a second server: {error}",
                    hint="graphkiln doctor examines this machine",
                ) from error
            for model, version in todo:
                name = model.stored.name
                if reason := verdicts[name, version].reason:
                    self.managed.refuse(model, version, reason)
                    self.managed.present(mirror, self.managed.plan(model.stored, model.stored.versions))
                else:
                    proven.add((name, version))

    def _served_proofs(self, folder: RunFolder) -> ServedProofs:
        from graphkiln_backend.server.proving_server import ProvingServer  # few servers need it
        from graphkiln_backend.server.served_proofs import ServedProofs

        of_backends = [
            f"--{name}={value}" for name in _BACKEND_FLAGS for value in self.flags.repeated_values.get(name, ())
        ]
        own = [f"--{name}={value}" for name, value in _default_values(self.installation, self.flags).items()]
        return ServedProofs(
            prover=ProvingServer(
                start=lambda arguments: self.start(folder, [str(self.installation.binary), *own, *arguments]),
                backends=folder.backends,
                arguments=of_backends,
                temporary=folder.temporary,
                regions=f"{folder.shared_memory_prefix}proof-",
                cache=self.cache,
                release=self.installation.version,
                deadline_s=self.load_deadline_s,
                memory_bytes=self.prove_memory_bytes,
            ),
            mirror=folder.overlay / "models",
            address=self.flags.listen_address("http"),
            headers=self.access.http_headers,
            deadline_s=self.load_deadline_s,
            book=self.proofs,
        )

    def _admit(self, temporary: Path, model: ShownModel, version: int, stopped: Callable[[], bool]) -> Verdict:
        """Prove a version with the configuration that will serve it."""
        from graphkiln_backend.server.admission import (  # imports lowering, needed for later versions only
            Candidate,
            admit,
        )

        config = temporary / "candidate.pbtxt"
        if model.config is not None:
            write_config(model.config, config)
        candidate = Candidate(
            folder=model.stored.folder / str(version),
            config=config,
            overrides=self.overrides.get(model.stored.name, ()),
            cache=self.cache,
            temporary=temporary,
        )
        return admit(candidate, deadline_s=self.load_deadline_s, stopped=stopped)

    def control(self) -> RepositoryControl | None:
        """Create the repository control of the server, running or not; None if neither HTTP nor plain gRPC is on."""
        http, grpc = self.flags.listen_address("http"), self.flags.listen_address("grpc")
        if "grpc-use-ssl" in self.flags.values:
            grpc = None
        if not (http or grpc):
            return None
        access = self.access
        return RepositoryControl(http=http, headers=access.http_headers, grpc=grpc, metadata=access.grpc_metadata)

    def start(self, folder: RunFolder, command: list[str]) -> subprocess.Popen[bytes]:
        """Start tritonserver in a new session, so that only the supervisor signals it.

        Its arguments contain the admin key, which other users of the machine can read: see SECURITY.md.
        """
        self.readiness.refused.clear()
        mode = ControlMode.read(self.flags)
        logs_failures = self.control() and (mode.managed or mode.name == "explicit")
        is_quiet = logs_failures and "log-verbose" not in self.flags.values
        on_failed = partial(self._note_failed, folder.overlay / "models") if is_quiet else None
        noise = self.readiness.log = NoiseFilter(has_gpu=_NVIDIA_DRIVER.exists(), on_failed=on_failed)
        try:
            return start(
                command,
                log=noise.fileno(),  # both outputs: Triton logs information to standard output since 25.06
                env=self._environment(folder),
                restore_signals=False,  # SIGPIPE stays ignored: a closed log must not end the server
                preexec_fn=end_with_parent,
            )
        finally:
            noise.start()

    def memory_limit(self) -> int:
        """Memory limit of tritonserver for requests in bytes; 0 for none.

        The default is 0 if it may hold graphs itself or use a GPU.
        """
        is_bare = self.installation.holds_no_graphs and self.flags.backends is None and not _NVIDIA_DRIVER.exists()
        return self.memory_bytes or (default_limit() if is_bare else 0)

    def _environment(self, folder: RunFolder) -> dict[str, str]:
        cache, record = self.cache, self.record
        if cache.folder:
            cache = replace(cache, folder=folder.readable(cache.folder, "cache"))
        if record:
            record = replace(record, folder=folder.readable(record.folder, "record"))
        return {
            **_ALLOCATOR,
            "ORT_DISABLE_TELEMETRY": "1",  # of the C++ backend, as in graphkiln's own instances
            **os.environ,
            "LD_LIBRARY_PATH": self.installation.library_path,
            # Triton's stub ignores PYTHONPATH; it finds the packages of the `python3` on the PATH.
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
            "TMPDIR": str(folder.temporary),
            VERSION_VARIABLE: self.installation.version,
            **to_environment(
                folder.instances, folder.shared, self.overrides, cache, self.replay_interval_s, record=record
            ),
        }


def _named_models(arguments: Sequence[str]) -> list[str]:
    following = [value for word, value in pairwise(arguments) if word == _LOAD_FLAG]
    return following + [word.partition("=")[2] for word in arguments if word.startswith(f"{_LOAD_FLAG}=")]


def may_all_load(arguments: Sequence[str], found: Mapping[str, StoredModel]) -> bool:
    """True if a server loads models at its start and none is known to be bad; log the bad ones."""
    names = _named_models(arguments)
    all_sound = True
    for name in names:
        model = found.get(name)
        if model is None:
            fault = "no store contains this model"
        else:
            fault = model.problem or ("" if model.sound_versions else "; ".join(model.faults.values()))
        if fault:  # Triton logs another reason, or none
            _log.error("%s is not loaded: %s", name, fault)
            all_sound = False
    return bool(names) and all_sound


def command_line(
    installation: Installation,
    folder: RunFolder,
    stores: Sequence[Path],
    flags: TritonFlags,
    memory: SharedMemoryPlan,
    *,
    complete: bool,
    readiness: Sequence[str] = (),
) -> list[str]:
    """Build the command line of tritonserver: the user's arguments as typed, and defaults for the others."""
    mode = ControlMode.read(flags)
    sizes = {"shm-default-byte-size": memory.region_bytes, "thread-pool-size": pool_size(memory.instances)}
    return [
        str(installation.binary),
        *(f"--model-repository={store}" for store in stores),
        f"--backend-directory={folder.backends}",
        f"--backend-config=python,shm-region-prefix-name={folder.shared_memory_prefix}",
        *(
            f"--backend-config=python,{option}={size}"
            for option, size in sizes.items()
            if not any(option in argument for argument in flags.arguments)
        ),
        *(f"--{name}={value}" for name, value in _default_values(installation, flags).items()),
        *(("--disable-auto-complete-config",) if complete else ()),
        *(word for word in mode.before_flags() if word.removeprefix("--").partition("=")[0] not in flags.values),
        *readiness,
        *flags.arguments,
        *mode.after_flags(),
    ]


def _default_values(installation: Installation, flags: TritonFlags) -> dict[str, str]:
    """Values of flags that the user did not give."""
    defaults = {"cache-directory": str(installation.caches), **flags.addresses}
    if "log-verbose" not in flags.values:
        defaults["log-info"] = "false"
    if not _NVIDIA_DRIVER.exists():
        # Without a GPU these would only log errors about missing drivers.
        defaults |= {"allow-gpu-metrics": "false", "enable-peer-access": "false", "pinned-memory-pool-byte-size": "0"}
    if "allow-client-shm" in installation.flags:  # since 26.04; the endpoint that registers it needs the admin key
        defaults["allow-client-shm"] = "true"
    return {name: value for name, value in defaults.items() if name not in flags.values}


def _image_mirror(folder: RunFolder) -> Mirror:
    """The mirror of models that take images, in explicit mode."""
    return Mirror(folder.overlay / "images")
