"""Mirrors of model stores for Triton: links to the user's files, and a complete config.pbtxt for each model.

Triton can complete configurations itself, but starts an extra process for each model version to do so, which takes at
least a second each. The user's folders are never modified.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from graphkiln_backend.graph.errors import ManifestError, RepositoryError
from graphkiln_backend.graph.preprocess import PREPROCESS, Preprocess
from graphkiln_backend.graph.text import did_you_mean, fault_in_served_name
from graphkiln_backend.repository.config import (
    BACKEND,
    DROP_IN_BACKEND,
    DROP_IN_PLATFORM,
    NATIVE,
    PLATFORMS,
    SEAT,
    ModelConfigProto,
    complete,
    read_config,
    write_config,
)
from graphkiln_backend.repository.model_config import ModelConfig
from graphkiln_backend.repository.publication import publish
from graphkiln_backend.repository.version import (
    CONFIG_FILE,
    find_labels_file,
    holds_ir,
    label_files,
    newest_version,
    read_version_signature,
)
from graphkiln_backend.repository.version_folders import confuses_triton, version_number

# Version folder -> folder that holds its graph: the same folder, unless the graph was imported from another framework.
GraphFolder = Callable[[Path], Path]


class OtherBackend(RepositoryError):
    """The model belongs to another Triton backend."""


def write_mirror(model: Path, mirror: Path, versions: Collection[int], config: ModelConfigProto | None) -> None:
    """Mirror a model by links, with a selection of its versions and another configuration.

    Label files are copied: Triton refuses a label file whose real path is outside the model's folder (since 26.02), and
    takes byte order marks and carriage returns for parts of labels.

    Args:
        model: The user's folder of the model; never written to.
        mirror: Where to build the mirror; must not exist.
        versions: Numbers of the versions to show.
        config: Content of config.pbtxt; None links to the user's file.

    Raises:
        OSError: The mirror cannot be written.
    """
    mirror.mkdir(parents=True)
    for entry in model.iterdir():
        if not _is_hidden(entry, versions) and (config is None or entry.name != CONFIG_FILE):
            (mirror / entry.name).symlink_to(entry.absolute())
    if config is not None:
        write_config(config, mirror / CONFIG_FILE)
    copy_labels(model, mirror, read_config(model / CONFIG_FILE) if config is None else config, clean=config is not None)


def copy_labels(model: Path, mirror: Path, config: ModelConfigProto, *, clean: bool = True) -> None:
    """Put real copies of the label files that a configuration names into a mirrored model.

    Args:
        model: The user's folder of the model.
        mirror: Its mirror. Links to folders on the way to a label file become folders of links.
        config: Names the label files.
        clean: As for `label_files`; models of other backends keep theirs.

    Raises:
        OSError: The mirror cannot be written.
        ManifestError: A file is no labels file.
    """
    for name, content in label_files(config, model, clean=clean).items():
        parts = Path(name).parts
        if len(parts) > 1 and version_number(parts[0]) is not None and not (mirror / parts[0]).exists():
            continue  # the labels of a version that is not mirrored
        for depth in range(1, len(parts)):
            _make_folder_of_links(mirror.joinpath(*parts[:depth]))
        (mirror / name).unlink(missing_ok=True)
        (mirror / name).write_bytes(content)


def _make_folder_of_links(path: Path) -> None:
    """Replace a link to a folder by a folder that links to each of its entries."""
    if path.is_symlink():
        target = path.resolve()
        path.unlink()
        path.mkdir()
        for entry in target.iterdir():
            (path / entry.name).symlink_to(entry)
    else:
        path.mkdir(exist_ok=True)


def _is_hidden(entry: Path, versions: Collection[int]) -> bool:
    """Return true for entries to hide from Triton: other versions, and names that it would misread as versions."""
    if entry.is_file():
        return False
    number = version_number(entry.name)
    return confuses_triton(entry.name) if number is None else number not in versions


def batch_footprints(mirrors: Sequence[Path]) -> list[int]:
    """Bytes of all inputs and outputs of a largest batch, one entry per instance of each model.

    This is a lower bound: dynamic dimensions count as 1, and strings as 0 bytes.

    Args:
        mirrors: Stores with complete configurations.
    """
    footprints = []
    for path in sorted(path for mirror in mirrors for path in mirror.glob(f"*/{CONFIG_FILE}")):
        config = ModelConfig.read(path, has_gpu=False)  # on a CPU there are at least as many instances as on a GPU
        if config.parameters.get(SEAT) != NATIVE:  # otherwise tritonserver itself computes
            footprints += [config.batch_bytes] * config.processes
    return footprints


def backend_of(config: ModelConfigProto, backends: frozenset[str]) -> str:
    """Return the name of the backend that serves a configuration; empty if only its platform names one.

    Args:
        config: The user's configuration.
        backends: Names under which the graphkiln backend is installed.
    """
    if not config.backend and (config.platform == DROP_IN_PLATFORM or not config.platform):
        return DROP_IN_BACKEND if DROP_IN_BACKEND in backends else BACKEND
    return str(config.backend)


def complete_config(
    model: Path,
    backends: frozenset[str],
    graph_folder: GraphFolder,
    version: int | None = None,
    served: Collection[int] | None = None,
) -> ModelConfigProto:
    """Read a model's configuration and complete it from the graph of one version.

    Args:
        model: The model's folder.
        backends: Names under which the graphkiln backend is installed.
        graph_folder: Returns the folder that holds the graph of a version.
        version: Number of the version; by default the newest one.
        served: Numbers of all versions to serve; by default those that the version policy selects.

    Raises:
        OtherBackend: The model belongs to another backend.
        RepositoryError: The configuration or the graph is invalid.
        ManifestError: The manifest cannot be read.
    """
    if fault := fault_in_served_name(model.name):
        raise RepositoryError(fault, hint="rename the folder: letters, digits, '_', '.' and '-'")
    config = read_config(model / CONFIG_FILE)
    if config.name not in ("", model.name):
        raise RepositoryError(
            f"the folder is named '{model.name}', but its {CONFIG_FILE} names the model '{config.name}'",
            hint=f'rename the folder, or remove the line `name: "{config.name}"` from {CONFIG_FILE}',
        )
    config.name = model.name
    folder = newest_version(model) if version is None else model / str(version)
    is_ir = not config.backend and not config.platform and holds_ir(folder, config.default_model_filename)
    config.backend = BACKEND if is_ir else backend_of(config, backends)
    if not config.backend and config.platform not in PLATFORMS:
        raise RepositoryError(
            f"{CONFIG_FILE} of '{model.name}' has the unknown platform '{config.platform}'",
            hint=did_you_mean(config.platform, PLATFORMS, otherwise="name a backend instead"),
        )
    if config.backend not in backends:
        raise OtherBackend(
            f"model '{model.name}' uses the backend '{config.backend or config.platform}'",
            hint="`graphkiln serve` can serve it beside others; other commands need a model of the graphkiln backend",
        )
    graph = graph_folder(folder)
    signature = read_version_signature(graph, config.default_model_filename)
    complete(config, signature, labels_file=find_labels_file(model))
    publish(config, model, served)
    _check_labels(config, model)
    _check_preprocess(config)
    return config


def _check_preprocess(config: ModelConfigProto) -> None:
    if PREPROCESS not in config.parameters or len(config.input) != 1:
        return
    try:
        preprocess = Preprocess.from_json(config.parameters[PREPROCESS].string_value)
    except ManifestError:  # a parameter of the model's owner
        return
    dims = [size if size >= 0 else "any" for size in config.input[0].dims]
    if sample := preprocess.misfit(dims):
        raise RepositoryError(
            f"the preprocess spec of '{config.name}' makes {sample}, but input '{config.input[0].name}' takes "
            f"{list(config.input[0].dims)}",
            hint=f"correct {PREPROCESS} in {CONFIG_FILE}, or convert the model again with --preprocess JSON",
        )


def _check_labels(config: ModelConfigProto, model: Path) -> None:
    label_files(config, model)  # refuses those that it cannot read
    for output in config.output:
        if output.label_filename and not (model / output.label_filename).is_file():
            raise RepositoryError(
                f"{CONFIG_FILE} of '{model.name}' names labels that do not exist: {output.label_filename}",
                hint=f"put it into the model's folder, or remove label_filename of output '{output.name}'",
            )
