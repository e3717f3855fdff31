"""The start of tritonserver: command line, environment, and the process itself."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from graphkiln_backend.cache.settings import CacheSettings
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.lowering.importing import convert_if_needed
from graphkiln_backend.repository.config import write_config
from graphkiln_backend.repository.stores import StoredModel
from graphkiln_backend.server.access import Access
from graphkiln_backend.server.flags import ControlMode, TritonFlags
from graphkiln_backend.server.image_models import ExplicitImages
from graphkiln_backend.server.installation import Installation
from graphkiln_backend.server.limits import check_instances, default_limit, pool_size
from graphkiln_backend.server.log import NoiseFilter
from graphkiln_backend.server.managed_stores import ManagedStores, ShownModel
from graphkiln_backend.server.mirror import Mirror, StoreView
from graphkiln_backend.server.repository_control import GrpcControl, HttpControl, RepositoryControl
from graphkiln_backend.server.run_folder import RunFolder
from graphkiln_backend.server.shared_memory import SharedMemoryPlan, free_shared_memory, plan_shared_memory
from graphkiln_backend.server.store_copies import StoreCopies
from graphkiln_backend.server.version_control import VersionController
from graphkiln_backend.system.processes import end_with_parent, start
from graphkiln_backend.triton.environment import DEFAULT_REPLAY_INTERVAL_S, Overrides, to_environment
from graphkiln_backend.triton.features import VERSION_VARIABLE

if TYPE_CHECKING:
    from graphkiln_backend.server.admission import Verdict

_log = logging.getLogger("graphkiln.server")

_LOAD_MARGIN_S = 30.0  # an instance that loads for too long is ended at its deadline; then its load ends by itself
_NVIDIA_DRIVER = Path("/dev/nvidiactl")
# Lets glibc keep the buffers of a request for the next one. By default it hands large ones back to the kernel, which
# clears every page anew: 8% of the time of a request of 600 kB, 10% of the throughput of a busy server. The user's own
# variables win. Source: mallopt(3).
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(128 << 20),
    "MALLOC_TOP_PAD_": str(16 << 20),
}
_LOAD_FLAG = "--load-model"
_ALL_MODELS = "*"

# A server is started so that it stays ready while versions come and go.
#
# Triton's own readiness (24.10) is strict or says nothing. Strict, it is "no" while any version number is being loaded
# that was not served before, although the older version answers; not strict, it is "yes" although a model has no
# version at all. It can only be chosen at the start. So a server first starts without it, and ends by itself, before
# it opens a port, if anything cannot be loaded: whenever it is live, every model has a version. If it does so, it is
# started again, strict, and serves what can be served, while readiness says "no".

# Behind `--exit-on-error=false` of `ControlMode.before_flags` on the same command line: the last flag counts.
_ALL_OR_NOTHING_FLAGS = ("--strict-readiness=false", "--exit-on-error=true")


@dataclass(slots=True)
class Readiness:
    """The choice of readiness for the next server; outlives the server's restarts.

    Attributes:
        whole: Whether the server that was started last serves every model or none.
        endless: Versions whose loading did not end when they were last tried, as the watchdog names them. It adds them,
            and the server that is started next, which serves the others, gives them no second chance; cleared once
            a server is live (by the supervisor), and for a start that does not follow upon such a failure (`choose`).
    """

    whole: bool = False
    endless: set[str] = field(default_factory=set)
    _failed: bool = False

    def choose(self, flags: TritonFlags, *, loads: bool) -> None:
        """Choose for a server that is about to start; `loads` says that it loads models, all of which may be good."""
        asked = {"strict-readiness", "exit-on-error"} & flags.values.keys()
        self.whole = loads and not asked and not self._failed
        if not self._failed:
            self.endless.clear()
        self._failed = False

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments of the server, before the user's own."""
        return _ALL_OR_NOTHING_FLAGS if self.whole else ()

    def give_in(self) -> bool:
        """The server ended before it was live: whether it may serve a part of its models if it is started again."""
        self._failed = self.whole
        return self.whole


@dataclass(slots=True)
class LoadedModels:
    """The models that were loaded when a server was last seen, in the user's explicit mode; outlives its restarts.

    Attributes:
        names: None before the first server was live.
    """

    names: Sequence[str] | None = None

    def remember(self, names: Sequence[str]) -> None:
        """Take over the models that are loaded now."""
        self.names = names

    def arguments(self, typed: Sequence[str], found: Collection[str] = ()) -> list[str]:
        """The user's arguments, with what was loaded in the place of what the user had loaded first.

        Args:
            typed: The user's.
            found: The models of the stores, in the place of `*`: Triton would take every folder for a model.
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
    """Everything that a server is started from.

    Attributes:
        installation: The server to run.
        stores: Model stores.
        flags: The user's flags for tritonserver.
        overrides: Settings of the command line, by model.
        cache: The artifact cache.
        replace_onnxruntime: Whether graphkiln's backend replaces an installed C++ `onnxruntime` backend.
        access: Which endpoints need a key.
        load_deadline_s: How long proving a new version may take before it appears to the server.
        replay_interval_s: Seconds between two replays of the golden samples of an instance; 0 for none.
        memory_bytes: Most memory that tritonserver itself may take; 0 for half of what is free.
        copies: Which of the stores are copies.
        managed: What is shown to Triton; filled by `prepare`. It outlives the server's restarts, as do the following.
        loaded: What is loaded in the user's explicit mode.
        readiness: How readiness is defined.
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
    managed: ManagedStores = field(default_factory=ManagedStores)
    loaded: LoadedModels = field(default_factory=LoadedModels)
    readiness: Readiness = field(default_factory=Readiness)

    def prepare(self, folder: RunFolder) -> list[str]:
        """Fill the run folder; where a graph must be converted first, that takes seconds.

        Args:
            folder: The folder of this run, empty.

        Returns:
            The command line for `start`.

        Raises:
            ServerSetupError: The backends cannot be assembled, or shared memory or threads are too few.
        """
        backends = folder.assemble_backends(
            self.installation, self.flags.backends, replace_onnxruntime=self.replace_onnxruntime
        )
        self.managed.stores = stores = folder.link_stores(self.stores)
        self.managed.mark = self.copies.mark
        mode, flags = ControlMode.read(self.flags), self.flags
        complete = mode.managed and self._fill_mirror(folder, backends, mode)
        loads = mode.managed and self.managed.shows_all()
        if mode.managed:
            stores = [Mirror(folder.overlay).path]
        elif mode.name == "explicit" and self.is_controllable:
            stores, found = self._link_stores(folder)
            flags = replace(flags, arguments=tuple(self.loaded.arguments(flags.arguments, found)))
            loads = may_all_load(flags.arguments, found)
        self.readiness.choose(flags, loads=loads)
        memory = plan_shared_memory(stores if complete else (), free_bytes=free_shared_memory())
        check_instances(memory.instances)
        line = command_line(
            self.installation, folder, stores, flags, memory, complete=complete, readiness=self.readiness.arguments
        )
        return [*line, *self.access.arguments]

    def version_controller(self, folder: RunFolder) -> VersionController | None:
        """Control the versions of a server that has just become live; None where that is left to Triton."""
        mode, control = ControlMode.read(self.flags), self.control()
        if control is None or not (mode.managed or mode.name == "explicit"):
            return None
        mirror = Mirror(folder.overlay)
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
            mirror=mirror,
            control=control,
            instances=folder.instances,
            admit=partial(self._admit, folder.temporary),
            load_timeout_s=load_timeout_s,
            copies=self.copies,
            view=None if mode.managed else self._view(folder, mirror),
            images=images,
            on_loaded=self.loaded.remember,
        )

    def _admit(self, temporary: Path, model: ShownModel, version: int, stopped: Callable[[], bool]) -> Verdict:
        """Prove a version, under the configuration that it would be served with."""
        from graphkiln_backend.server.admission import Candidate, admit  # the whole of lowering, for later versions

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

    @property
    def is_controllable(self) -> bool:
        """True if a server that is started from this can be reached to control what it loads."""
        return self.control() is not None

    def control(self) -> RepositoryControl | None:
        """The repository control of the server, which need not run yet; None where nothing reaches it."""
        http, grpc = self.flags.listen_address("http"), self.flags.listen_address("grpc")
        plain_grpc = grpc and "grpc-use-ssl" not in self.flags.values
        over_grpc = GrpcControl(grpc, self.access.grpc_metadata) if grpc and plain_grpc else None
        return HttpControl(http, self.access.http_headers, over_grpc) if http else over_grpc

    def _view(self, folder: RunFolder, mirror: Mirror) -> StoreView:
        return StoreView(folder.overlay / "stores", self.managed.stores, mirror)

    def _link_stores(self, folder: RunFolder) -> tuple[list[Path], dict[str, StoredModel]]:
        """The stores as Triton sees them in the user's explicit mode, and the models in them.

        Raises:
            ServerSetupError: The stores cannot be read.
        """
        mirror = Mirror(folder.overlay)
        view = self._view(folder, mirror)
        try:
            view.show_mirrored(())
            return [*view.paths, _image_mirror(folder).path], self.managed.scan()
        except OSError as error:
            raise _unreadable(error) from error

    def start(self, folder: RunFolder, command: list[str]) -> subprocess.Popen[bytes]:
        """Start tritonserver in its own session, so that only the supervisor signals it.

        The admin key is among its arguments, where other users of the machine can read it: see SECURITY.md.
        """
        noise = NoiseFilter(has_gpu=_NVIDIA_DRIVER.exists())
        try:
            return start(
                command,
                log=noise.fileno(),  # both outputs: since 25.06 Triton logs information on standard output
                env=self._environment(folder),
                restore_signals=False,  # SIGPIPE stays ignored: a log that is no longer read must not end the server
                preexec_fn=end_with_parent,
            )
        finally:
            noise.start()

    def memory_limit(self) -> int:
        """Bytes that the server itself may take for requests, or 0 for any number.

        That is so where it may hold graphs or talk to a GPU, and the user has given no limit.
        """
        is_bare = self.installation.holds_no_graphs and self.flags.backends is None and not _NVIDIA_DRIVER.exists()
        return self.memory_bytes or (default_limit() if is_bare else 0)

    def _fill_mirror(self, folder: RunFolder, backends: frozenset[str], mode: ControlMode) -> bool:
        """Mirror the stores; whether every configuration in the mirror is complete.

        Raises:
            ServerSetupError: The stores cannot be mirrored.
        """
        try:
            with self.cache.open(folder.shared / "artifacts") as cache:
                graph_folder = partial(convert_if_needed, cache=cache, in_subprocess=True) if mode.completes else None
                return self.managed.open(Mirror(folder.overlay), backends, graph_folder)
        except OSError as error:
            raise _unreadable(error) from error

    def _environment(self, folder: RunFolder) -> dict[str, str]:
        cache = replace(self.cache, folder=folder.readable(self.cache.folder)) if self.cache.folder else self.cache
        return {
            **_ALLOCATOR,
            **os.environ,
            "LD_LIBRARY_PATH": self.installation.library_path,
            # Triton's stub takes no PYTHONPATH; it finds its interpreter's packages through `python3` on the PATH.
            "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
            "TMPDIR": str(folder.temporary),
            VERSION_VARIABLE: self.installation.version,
            **to_environment(folder.instances, folder.shared, self.overrides, cache, self.replay_interval_s),
        }


def _named_models(arguments: Sequence[str]) -> list[str]:
    following = [value for word, value in pairwise(arguments) if word == _LOAD_FLAG]
    return following + [word.partition("=")[2] for word in arguments if word.startswith(f"{_LOAD_FLAG}=")]


def may_all_load(arguments: Sequence[str], found: Mapping[str, StoredModel]) -> bool:
    """True if a server loads models at its start, all of which may be good; log those that are known to be bad."""
    names = _named_models(arguments)
    faults = {name: fault for name in names if (fault := _fault(found.get(name)))}
    for name, fault in faults.items():  # Triton would log another reason, or none
        _log.error("%s is not loaded: %s", name, fault)
    return bool(names) and not faults


def _fault(model: StoredModel | None) -> str:
    if model is None:
        return "no store holds such a model"
    return model.problem or ("" if model.sound_versions else "; ".join(model.faults.values()))


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
    """Tritonserver's command line: the user's arguments as typed, and defaults where the user gave none."""
    mode = ControlMode.read(flags)
    sizes = {"shm-default-byte-size": memory.region_bytes, "thread-pool-size": pool_size(memory.instances)}
    return [
        str(installation.binary),
        *(f"--model-repository={store}" for store in stores),
        f"--backend-directory={folder.backends}",
        f"--backend-config=python,shm-region-prefix-name={folder.shared_memory_prefix}",
        *(f"--backend-config=python,{option}={size}" for option, size in sizes.items() if not _gives(flags, option)),
        *(f"--{name}={value}" for name, value in _default_values(installation, flags).items()),
        *(("--disable-auto-complete-config",) if complete else ()),
        *(word for word in mode.before_flags() if _flag_name(word) not in flags.values),
        *readiness,
        *flags.arguments,
        *mode.after_flags(),
    ]


def _default_values(installation: Installation, flags: TritonFlags) -> dict[str, str]:
    """Values for flags that the user left out."""
    defaults = {"cache-directory": str(installation.caches), **flags.addresses}
    if "log-verbose" not in flags.values:
        defaults["log-info"] = "false"
    if not _NVIDIA_DRIVER.exists():
        # Without a GPU these only produce errors about missing drivers, in which a real error would drown.
        defaults |= {"allow-gpu-metrics": "false", "enable-peer-access": "false", "pinned-memory-pool-byte-size": "0"}
    if "allow-client-shm" in installation.flags:  # since 26.04; the endpoint that registers it needs the admin key
        defaults["allow-client-shm"] = "true"
    return {name: value for name, value in defaults.items() if name not in flags.values}


def _image_mirror(folder: RunFolder) -> Mirror:
    """Placeholders for models that take images, beside what is shown of the stores in explicit mode."""
    return Mirror(folder.overlay / "images")


def _unreadable(error: OSError) -> ServerSetupError:
    return ServerSetupError(f"cannot mirror the model stores: {error}", hint="can they be read?")


def _flag_name(word: str) -> str:
    return word.removeprefix("--").partition("=")[0]


def _gives(flags: TritonFlags, option: str) -> bool:
    return any(option in argument for argument in flags.arguments)
