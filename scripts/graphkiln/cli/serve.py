"""`graphkiln serve`: serve model stores with a supervised tritonserver."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from graphkiln.cli.console import log_as_json, make_table, print_result, say, stderr_console
from graphkiln.cli.options import COMPUTE_LIMIT_S, Cache
from graphkiln_backend.graph.errors import ServerSetupError
from graphkiln_backend.graph.text import did_you_mean
from graphkiln_backend.system.closing import Closeable

if TYPE_CHECKING:
    from rich.live import Live

    from graphkiln_backend.lowering.settings import Override
    from graphkiln_backend.server.access import Access
    from graphkiln_backend.server.edge import EdgePlan
    from graphkiln_backend.server.flags import ListenAddress, TritonFlags
    from graphkiln_backend.server.installation import Installation
    from graphkiln_backend.server.model_states import LoadProgress, ModelState
    from graphkiln_backend.server.tls import TlsFiles
    from graphkiln_backend.triton.environment import Overrides, RecordSettings

_log = logging.getLogger("graphkiln.cli")

_DEFAULT_STORE = Path("model_repository")
_LONGEST_S = 1e6  # replaces infinity, which system calls do not accept
_LOG_FORMAT_VARIABLE = "GRAPHKILN_LOG_FORMAT"  # of `triton.environment`, which is imported later
_TRITONS_FORMATS = ("default", "ISO8601")
_LOG_FORMATS = ("text", "json", *_TRITONS_FORMATS)


def _choose_log_format(context: typer.Context, value: str) -> str:
    """Switch stderr to JSON at once, so that errors of other options are JSON, too."""
    if value not in _LOG_FORMATS:
        raise typer.BadParameter(f"'{value}' is not one of {', '.join(_LOG_FORMATS)}")
    if value == "json" and not context.resilient_parsing:
        os.environ[_LOG_FORMAT_VARIABLE] = value
        log_as_json()
    return value


LogFormatOption = Annotated[
    str,
    typer.Option(
        help="text; json: each line of the log is an object, and failed requests are logged with their ids; "
        "default or ISO8601: formats of tritonserver for its own lines.",
        envvar=_LOG_FORMAT_VARIABLE,
        metavar="FORMAT",
        callback=_choose_log_format,
        is_eager=True,
    ),
]


def _choose_state(value: Path | None) -> Path:
    from graphkiln_backend.server.rollouts import state_folder

    return state_folder(value)


def serve(
    context: typer.Context,
    model_store: Annotated[
        list[str] | None,
        typer.Option(
            help="Folder of models or of one model, or s3://, gs://, as://, hf://, oci://; may be repeated.",
            envvar="GRAPHKILN_MODEL_STORE",
            metavar="STORE",
            show_default="./model_repository",
        ),
    ] = None,
    enable_openvino: Annotated[
        list[str] | None, typer.Option(help="Run this model with OpenVINO; may be repeated.", metavar="NAME")
    ] = None,
    enable_tensorrt: Annotated[
        list[str] | None,
        typer.Option(help="Run this model with TensorRT (not yet run on a GPU); may be repeated.", metavar="NAME"),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Override a setting of a model's config.pbtxt, such as resnet.precision=bf16; may be repeated.",
            metavar="MODEL.KEY=VALUE",
        ),
    ] = None,
    cache: Cache = "",
    cache_size: Annotated[
        str, typer.Option(help="Maximum size of the cache; least recently used entries are evicted.", metavar="SIZE")
    ] = "20G",
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", envvar="GRAPHKILN_HOST", metavar="ADDRESS")
    ] = "127.0.0.1",
    admin_key_file: Annotated[
        str,
        typer.Option(
            help="File with the key for repository control, shared memory, trace and logging; created if missing. "
            "'off' allows them without a key.",
            envvar="GRAPHKILN_ADMIN_KEY_FILE",
            show_default="a new key, which your own commands on this machine find",
            metavar="FILE",
        ),
    ] = "",
    trusted_keys: Annotated[
        Path | None,
        typer.Option(
            help="Public keys or certificates in PEM, a file or a folder of *.pub and *.pem: only versions signed by "
            "one of them are served.",
            envvar="GRAPHKILN_TRUSTED_KEYS",
            metavar="FILE|DIR",
        ),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(help="Certificate in PEM; enables TLS for HTTP and gRPC.", metavar="FILE")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(help="Private key of the certificate, in PEM.", metavar="FILE")
    ] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            help="Certificate authorities in PEM; clients need a certificate of one of them (mutual TLS).",
            metavar="FILE",
        ),
    ] = None,
    edge: Annotated[
        str,
        typer.Option(
            help="HAProxy in front of the server: on, off, or auto (for TLS, and when listening beyond loopback).",
            metavar="MODE",
        ),
    ] = "auto",
    edge_rate: Annotated[
        int,
        typer.Option(
            help="Maximum requests per second of one client address; 0 for no limit.",
            metavar="NUMBER",
            min=0,
        ),
    ] = 0,
    show_edge: Annotated[
        bool, typer.Option("--show-edge", help="Print the configuration of HAProxy without secrets, and exit.")
    ] = False,
    page: Annotated[
        bool,
        typer.Option(
            "--page",
            help="Also serve a web page to inspect and try the models; its address may follow.",
        ),
    ] = False,
    page_at: Annotated[
        str,
        typer.Option(
            "--page-address",
            help="Address of the page; implies --page.",
            metavar="HOST[:PORT]",
            show_default="127.0.0.1:8003",
        ),
    ] = "",
    page_name: Annotated[
        list[str] | None,
        typer.Option(
            help="Host name allowed in requests to the page, besides addresses and localhost; may be repeated.",
            metavar="NAME",
        ),
    ] = None,
    server_memory: Annotated[
        str,
        typer.Option(
            help="Maximum memory of tritonserver for requests, not counting models.",
            show_default="half of the free memory",
            metavar="SIZE",
        ),
    ] = "",
    replay_interval: Annotated[
        float,
        typer.Option(
            help="Seconds between two replays of the golden samples in each instance; 0 for none. "
            "The server is restarted if an instance computes wrong outputs.",
            envvar="GRAPHKILN_REPLAY_INTERVAL",
            metavar="SECONDS",
            min=0,
        ),
    ] = 600.0,
    record: Annotated[
        Path | None,
        typer.Option(
            help="Record a share of the requests with their answers in this folder, as Parquet files.",
            metavar="DIR",
            show_default="off",
        ),
    ] = None,
    record_share: Annotated[str, typer.Option(help="Share of requests to record.", metavar="SHARE")] = "1%",
    record_inputs: Annotated[
        str, typer.Option(help="full, or digest to record only SHA-256 digests of the inputs.", metavar="FORM")
    ] = "full",
    record_keep: Annotated[
        str, typer.Option(help="Age and total size from which the oldest files are removed.", metavar="TIME,SIZE")
    ] = "7d,10GB",
    prove_memory: Annotated[
        str,
        typer.Option(
            help="Versions of other backends and of the native seat are proven together in a second server before they "
            "are served, as long as their files are not larger together; 0 proves one at a time.",
            metavar="SIZE",
        ),
    ] = "4G",
    replace_onnxruntime: Annotated[
        bool, typer.Option("--replace-onnxruntime", help="Also replace an installed C++ onnxruntime backend.")
    ] = False,
    drain: Annotated[
        float, typer.Option(help="Time for requests in flight to finish after SIGTERM.", metavar="SECONDS", min=0)
    ] = 5,
    compute_limit: Annotated[
        float,
        typer.Option(help="Maximum time of one batch; then the server is restarted.", metavar="SECONDS", min=0.1),
    ] = COMPUTE_LIMIT_S,
    load_deadline: Annotated[
        float, typer.Option(help="Maximum time for loading a version; then it is given up.", metavar="SECONDS", min=1)
    ] = 600,
    state: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the state of rollouts.",
            callback=_choose_state,
            envvar="GRAPHKILN_STATE",
            show_default="~/.local/state/graphkiln",
            metavar="DIR",
        ),
    ] = None,
    log_format: LogFormatOption = "text",
) -> None:
    """Serve model stores on NVIDIA Triton until SIGTERM or Ctrl-C.

    Stores may also be given as arguments. `graphkiln serve STORE/NAME` serves one
    model of a store.

    Other flags are passed to tritonserver unchanged, for example --http-port=9000,
    --model-control-mode=poll or --log-verbose=1.
    """
    from graphkiln_backend.server.installation import find_installation

    installation = find_installation()
    installation.ask_flags()  # runs tritonserver's --help beside the imports

    from graphkiln.cli.cache import cache_settings, parse_size
    from graphkiln.cli.options import open_stores
    from graphkiln.page.launch import chosen_address, is_address, open_page, with_quantiles
    from graphkiln_backend.server.access import Access, AdminKey, PublishedKey
    from graphkiln_backend.server.edge import open_edge
    from graphkiln_backend.server.flags import ControlMode, TritonFlags
    from graphkiln_backend.server.launch import Launch
    from graphkiln_backend.server.limits import raise_file_limit
    from graphkiln_backend.server.ports import PortClaims
    from graphkiln_backend.server.run_folder import remove_leftovers
    from graphkiln_backend.server.store_copies import copied_stores, read_trusted
    from graphkiln_backend.server.supervisor import Supervisor
    from graphkiln_backend.server.tls import TlsFiles
    from graphkiln_backend.server.watchdog import TimeLimits
    from graphkiln_backend.storage.address import parse_store

    flags = TritonFlags.parse(
        [*context.args, *([f"--log-format={log_format}"] if log_format in _TRITONS_FORMATS else [])],
        installation.flags,
        host,
        is_other=lambda word: page and is_address(word),
    )
    page_listens = chosen_address(page_at, flags.others, wanted=page or bool(page_name))
    flags = with_quantiles(flags) if page_listens else flags
    recording = _record_settings(record, record_share, record_inputs, record_keep) if record else None
    key = None if admin_key_file == "off" else AdminKey.obtain(Path(admin_key_file) if admin_key_file else None)
    access = Access.plan(flags, key)
    tls = TlsFiles.choose(tls_cert, tls_key, tls_client_ca)
    plan = _plan_edge(edge, flags, access, tls, edge_rate, installation, show=show_edge)
    named = [*map(parse_store, model_store or ()), *flags.stores] or [_DEFAULT_STORE]
    with open_stores([store for store in named if isinstance(store, Path)]) as folders:
        settings = cache_settings(cache, parse_size(cache_size)).checked()
        raise_file_limit()
        remove_leftovers()
        settings.remove_unfinished()
        flags.check_ports(page_listens)
        inner, load_deadline_s = plan.inner if plan else flags, min(load_deadline, _LONGEST_S)
        remote = [store for store in named if not isinstance(store, Path)]
        with (
            PortClaims(flags),
            copied_stores(folders, remote, read_trusted(trusted_keys), settings, ControlMode.read(flags).poll_s) as (
                stores,
                copies,
            ),
        ):
            display, report = LoadDisplay(), log_states if log_format == "json" else print_states

            def on_live(states: list[ModelState]) -> None:
                display.close()
                report(states, address_lines(flags, page_listens, secure=bool(tls)))

            launch = Launch(
                installation=installation,
                stores=stores,
                copies=copies,
                flags=inner.on_loopback(["metrics"], flags.listen_addresses()),
                overrides=_with_listed(
                    _overrides(
                        set_ or [], {"openvino": enable_openvino or [], "tensorrt": enable_tensorrt or []}, stores
                    ),
                    [store for store in named if isinstance(store, Path)],
                ),
                cache=settings,
                load_deadline_s=load_deadline_s,
                replay_interval_s=min(replay_interval, _LONGEST_S),
                replace_onnxruntime=replace_onnxruntime,
                access=access,
                memory_bytes=parse_size(server_memory) if server_memory else 0,
                prove_memory_bytes=parse_size(prove_memory),
                state=state,
                record=recording,
            )
            _say_which_triton(installation, flags, has_key=not access.open_endpoints)
            with (
                PublishedKey(key, flags),
                open_edge(plan) as in_front,
                open_page(page_listens, flags, inner, tls, stores, names=page_name or ()),
                display,
            ):
                supervisor = Supervisor(
                    launch,
                    on_live=on_live,
                    on_loading=display.show,
                    limits=TimeLimits(compute=compute_limit, load=load_deadline_s, drain=drain),
                    edge=in_front,
                    metrics=inner.listen_address("metrics"),
                )
                code = supervisor.run()
    if code:
        with suppress(OSError):
            say(
                f"{supervisor.last_words or f'tritonserver ended with code {code}'}; see the cause above", logging.ERROR
            )
    raise typer.Exit(code)


def _record_settings(folder: Path, share: str, inputs: str, keep: str) -> RecordSettings:
    """Parse the options of the record, and create its folder; instances report a folder that cannot be used."""
    from graphkiln_backend.graph.modules import require_packages
    from graphkiln_backend.triton.environment import RecordSettings

    require_packages("--record", ["pyarrow"], extra="score")
    settings = RecordSettings.parse(folder, share, inputs, keep)
    with suppress(OSError):
        settings.folder.mkdir(0o700, parents=True, exist_ok=True)
    return settings


def _say_which_triton(installation: Installation, flags: TritonFlags, *, has_key: bool) -> None:
    from graphkiln_backend.server.advisories import assess

    known = assess(installation, flags, has_key=has_key)
    say(f"{installation.title}: {known}{'; graphkiln doctor --json names them' if known.known else ''}")


def _plan_edge(
    mode: str,
    flags: TritonFlags,
    access: Access,
    tls: TlsFiles | None,
    rate: int,
    installation: Installation,
    *,
    show: bool,
) -> EdgePlan | None:
    """Decide about the edge, and warn of open endpoints; with `show`, print the edge's configuration and exit."""
    from graphkiln_backend.server.edge import EdgePlan

    access.warn_if_open(flags)
    mode, features = "on" if show else mode, installation.features
    plan = EdgePlan.choose(mode, flags, access, tls, rate=rate, features=features)
    if plan and show:
        print_result(plan.shown())
        raise typer.Exit
    return plan


def _overrides(settings: list[str], enabled: dict[str, list[str]], stores: list[Path]) -> Overrides:
    """Collect the settings of the command line by model; those of --set precede those of --enable-*."""
    from graphkiln_backend.lowering.settings import Override, parse_override
    from graphkiln_backend.repository.stores import model_folders

    models = sorted({path.name for store in stores for path in model_folders(store)})
    overrides: dict[str, list[Override]] = {}
    for text in settings:
        model, dot, setting = text.partition(".")
        if not dot:
            raise ServerSetupError(f"--set {text}: no model is named", hint="--set MODEL.KEY=VALUE")
        _check_model(model, models, stores, f"--set {text}")
        overrides.setdefault(model, []).append(parse_override(setting))
    engines: dict[str, str] = {}
    for engine, names in enabled.items():
        for name in names:
            _check_model(name, models, stores, f"--enable-{engine} {name}")
            if engines.setdefault(name, engine) != engine:
                raise ServerSetupError(f"both --enable-{engines[name]} and --enable-{engine} are given for '{name}'")
            overrides.setdefault(name, []).append(Override("engine", engine, f"--enable-{engine}"))
    return overrides


def _with_listed(overrides: Overrides, stores: Sequence[Path]) -> Overrides:
    """Add the settings of models in a `config.json` of OpenVINO Model Server, and say which keys have no effect."""
    from graphkiln_backend.lowering.settings import openvino_override
    from graphkiln_backend.repository.ovms import read_ovms

    found = {name: list(settings) for name, settings in overrides.items()}
    for store in filter(None, map(read_ovms, stores)):
        for note in store.notes:
            say(note, logging.WARNING)
        for model in store.models:
            for note in model.notes:
                say(note, logging.WARNING)
            for key, value in model.properties.items():
                where = f"{store.path}: model '{model.name}': {key}"
                override, reason = openvino_override(key, value, where)
                if override:
                    found.setdefault(model.name, []).append(override)
                elif reason:
                    say(f"{where} {value} has no effect: {reason}", logging.WARNING)
    return found


def _check_model(name: str, models: list[str], stores: list[Path], flag: str) -> None:
    if name not in models:
        raise ServerSetupError(
            f"{flag}: there is no such model in {', '.join(map(str, stores))}", hint=did_you_mean(name, models)
        )


# Display: the progress of loading, then a table of the served models.

_REFRESH_S = 0.25
_SLOW_S = 1.0  # faster models have no lines of progress
_TABLE_COLUMNS = 80
_REASON_LENGTH = 80  # in the table; the full reason is above it, in the log, or follows below


class LoadDisplay(Closeable):
    """Progress of all models: a live table on a terminal, otherwise a line for each slow step."""

    def __init__(self) -> None:
        self._console = stderr_console()
        self._live: Live | None = None
        self._printed: dict[tuple[str, int], str] = {}
        self._shown_at = 0.0

    def show(self, rows: Sequence[LoadProgress]) -> None:
        """Show the state of all models; may be called at any rate."""
        if self._console is None:
            for row in rows:
                self._print(row)
        elif rows and time.monotonic() - self._shown_at > _REFRESH_S:
            self._shown_at = time.monotonic()
            if self._live is None:
                from rich.live import Live

                self._live = Live(console=self._console, transient=True, auto_refresh=False)
                self._live.start()
            cells = [(row.model, str(row.version), row.activity, f"{row.seconds:.1f}") for row in rows]
            self._live.update(make_table(("model", "version", "state", "seconds"), cells), refresh=True)

    def close(self) -> None:
        """Remove the table from the terminal; the next start of the server begins a new one."""
        if self._live:
            self._live.stop()
            self._live = None
        self._printed.clear()

    def _print(self, row: LoadProgress) -> None:
        """Print each new step of a slow model, and its end."""
        key = (row.model, row.version)
        last = self._printed.get(key, "")
        if row.activity == last or (row.seconds < _SLOW_S if not row.is_ready else not last):
            return
        self._printed[key] = row.activity
        end = f" in {row.seconds:.1f} s" if row.is_ready else ""
        say(f"{row.model} version {row.version}: {row.activity}{end}")


def address_lines(flags: TritonFlags, page: ListenAddress | None, *, secure: bool) -> list[str]:
    """Lines with the addresses of the server and of its page."""
    addresses = [f"{each.protocol} {each.local_address[0]}:{each.port}" for each in flags.listen_addresses()]
    lines = [("serving with TLS " if secure else "serving ") + ", ".join(addresses)]
    if page:
        from graphkiln.page.launch import page_url

        lines.append(f"page {page_url(page, secure=secure)}")
    return lines


def log_states(states: Sequence[ModelState], addresses: Sequence[str]) -> None:
    """Log an event for each version, then the addresses."""
    if not states:
        _log.warning("no model is loaded")
    for state in states:
        extra = {"model": state.model}
        if state.status and state.state == "READY":
            status = state.status
            served = f"{_engine(state)}, {status.precision}, loaded in {status.load_ms:.0f} ms"
            _log.info("version %s is ready: %s", state.version, served, extra=extra)
        elif state.proof and state.state == "READY":
            _log.info("version %s is ready: %s", state.version, _engine(state), extra=extra)
        elif not state.is_refused:  # otherwise it is logged
            reason = state.reason or "no reason is known"
            _log.error("version %s is %s: %s", state.version, state.state.lower(), reason, extra=extra)
    for line in addresses:
        _log.info("%s", line)


def print_states(states: Sequence[ModelState], addresses: Sequence[str]) -> None:
    """Print a table of all versions and the addresses to stdout.

    Raises:
        OSError: The reader of stdout has ended, or the disk is full.
    """
    from textwrap import shorten

    from rich.console import Console

    rows = []
    for state in states:
        cells = ["-", "-", "-"]
        if state.state != "READY":
            cells[0] = shorten(state.reason, _REASON_LENGTH) or "-"
        elif state.status:
            cells = [_engine(state), state.status.precision, f"{state.status.load_ms:.0f} ms"]
        elif state.proof:
            cells[0] = _engine(state)
        rows.append([state.model, state.version, state.state.lower(), *cells])
    table = make_table(("model", "version", "state", "engine, or why not", "precision", "time"), rows)
    table.collapse_padding = True
    reasons = [
        f"{each.model} {each.version}: {each.reason}"
        for each in states
        if each.reason and each.state != "READY" and not each.is_refused
    ]
    console = Console()
    console.width = min(console.width, _TABLE_COLUMNS)
    with console.capture() as printed:  # rich would exit if the reader of stdout has ended
        console.print(table if states else "no model is loaded")
        for line in (*reasons, *addresses):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    print_result(printed.get())


def _engine(state: ModelState) -> str:
    status, proof = state.status, state.proof
    if status:
        return f"{status.engine} on {status.device}, {status.threads} threads"
    if proof is None:
        return "-"
    backend = f"{proof.backend} in C++" if proof.seat else f"backend {proof.backend}"
    return f"{backend}, {'proven' if proof.proven else 'unproven'}"
