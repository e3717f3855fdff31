"""Shared parts of the verbs for images: arguments, progress, errors of single images, drawings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from graphkiln.cli.console import printable, progress_bar, say
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.images.formats import SUFFIXES, list_images, recognize_text

if TYPE_CHECKING:
    from PIL import Image

    from graphkiln.cli.connection import ConnectionOptions
    from graphkiln_client import Model
    from graphkiln_client.image_requests import Form

T = TypeVar("T")

Images = Annotated[list[Path], typer.Argument(help="Image files or folders of them.", metavar="IMAGE")]
BatchSize = Annotated[int, typer.Option(help="Maximum number of images per request.", min=1)]
Concurrency = Annotated[int, typer.Option(help="Concurrent requests.", min=1)]
Encoded = Annotated[
    bool | None,
    typer.Option(
        "--encoded/--tensor",
        help="Send encoded images, or decode them here.",
        show_default="encoded, if that is smaller and the server supports it",
    ),
]
# `Encoded` -> argument `images` of the client's models.
FORMS: dict[bool | None, Form] = {None: "auto", True: "encoded", False: "tensor"}

# Number of images from which on a progress bar is shown.
_MANY = 20
# URL prefixes as `Path` represents them, which merges slashes.
_URLS = ("http:/", "https:/")
_SHOWN = 60


def send_images(
    connection: ConnectionOptions,
    served: tuple[str, str, bool | None],
    paths: Sequence[Path],
    batching: tuple[int, int],
    request: Callable[[Model, dict[str, Any]], Iterable[T | ClientError]],
) -> tuple[list[tuple[Path, T]], list[tuple[Path, ClientError]]]:
    """Send images to a model, with a progress bar; return answers and errors, each with its image.

    Args:
        connection: Connection options.
        served: Name and version ("" for the server's choice) of the model, and the value of `Encoded`.
        paths: Images.
        batching: Values of `BatchSize` and `Concurrency`.
        request: Calls a method of the model with common options.

    Raises:
        ClientError: All images failed for the same reason.
    """
    name, version, encoded = served
    batch_size, concurrency = batching
    with connection.connect() as client, show_progress(len(paths)) as progress:
        options = {"batch_size": batch_size, "concurrency": concurrency, "on_error": "return", "progress": progress}
        answers = list(request(client.model(name, version, images=FORMS[encoded]), options))
    return split_errors(paths, answers)


@contextmanager
def show_progress(count: int) -> Iterator[Callable[[int], None] | None]:
    """Show a progress bar on a terminal for many images."""
    if count < _MANY:
        yield None
        return
    with progress_bar("images", count) as update:
        yield (lambda done: update(completed=done)) if update else None


def expand_folders(images: Sequence[Path]) -> list[Path]:
    """Replace folders by their images, sorted; warn about images in unsupported formats.

    Raises:
        InvalidInput: A folder has no images, or an argument is not a local path.
    """
    paths: list[Path] = []
    for image in images:
        check_place(image)
        if not image.is_dir():
            paths.append(image)
            continue
        files, left_out = list_images(image)
        if left_out:
            say(printable(left_out))
        paths += files
    return paths


def check_place(image: Path) -> None:
    """Refuse URLs, images as text, and `-` in place of a path.

    Raises:
        InvalidInput: The argument is not a local path.
    """
    if os.path.exists(image):  # noqa: PTH110 - `Path.exists` raises for a name that is too long
        return
    if found := recognize_text(os.fsencode(image)):
        shown = str(image)[:_SHOWN]
        raise InvalidInput(
            f"{shown}... is not a path but {found.name}", hint=f"{found.way_out}; then give the path of the file"
        )
    if str(image).startswith(_URLS):
        raise InvalidInput(
            f"{image} is a URL, but images are read from files",
            hint="download it first (curl -O URL), or use Python: Client(fetch_urls=True)",
        )
    if str(image) == "-":
        hint = "write it to a file first: ... > image.jpg"
        raise InvalidInput("images cannot be read from standard input (-)", hint=hint)


def split_errors(
    paths: Sequence[Path], answers: Sequence[T | ClientError]
) -> tuple[list[tuple[Path, T]], list[tuple[Path, ClientError]]]:
    """Separate answers from errors, each with its image.

    Raises:
        ClientError: All images failed for the same reason.
    """
    pairs = list(zip(paths, answers, strict=True))
    failures = [(path, answer) for path, answer in pairs if isinstance(answer, ClientError)]
    if len({str(error) for _, error in failures}) == 1 and len(failures) == len(paths):
        raise failures[0][1]
    return [(path, answer) for path, answer in pairs if not isinstance(answer, ClientError)], failures


def report_failures(failures: Sequence[tuple[Path, ClientError]]) -> None:
    """Print errors of images on stderr; exit with code 1 if there are any."""
    for path, error in failures:
        text = str(error)
        say(printable(text if text.startswith(str(path)) else f"{path}: {text}"))
    if failures:
        raise typer.Exit(1)


def check_formats(paths: Sequence[Path], draw: Path | None, *, as_json: bool, as_csv: bool) -> None:
    """Check options of the output for conflicts.

    Raises:
        InvalidInput: Options are mutually exclusive, or the format of `--draw` is unknown.
    """
    if as_json and as_csv:
        raise InvalidInput("--json and --csv are mutually exclusive: choose one")
    if draw is None or not _is_file_name(draw):
        return
    if len(paths) > 1:
        raise InvalidInput(f"--draw {draw} is one file for {len(paths)} images", hint="name a folder: --draw OUT/")
    if draw.suffix.lower() not in SUFFIXES:
        raise InvalidInput(f"--draw {draw}: unknown image format", hint=f"known suffixes: {' '.join(sorted(SUFFIXES))}")


def drawing_paths(paths: Sequence[Path], draw: Path | None) -> dict[Path, Path]:
    """Return the path of each image's drawing: the file `draw`, or a file with the image's name in that folder.

    Images with the same name are distinguished by their folders below the common one.

    Returns:
        Image -> drawing; empty if `draw` is None.

    Raises:
        InvalidInput: A drawing would overwrite an image.
    """
    if draw is None:
        return {}
    targets = [draw] if len(paths) == 1 and _is_file_name(draw) else [draw / name for name in _names(paths)]
    images = {path.resolve(): path for path in paths}
    for target in targets:
        if image := images.get(target.resolve()):
            raise InvalidInput(f"--draw {draw}: a drawing would overwrite {image}", hint="choose another folder")
    return dict(zip(paths, targets, strict=True))


def _is_file_name(draw: Path) -> bool:
    return bool(draw.suffix) and not draw.is_dir()


def _names(paths: Sequence[Path]) -> list[str]:
    stems = [path.stem for path in paths]
    if len({*stems}) == len({*paths}):
        return [f"{stem}.png" for stem in stems]
    places = [Path(os.path.normpath(path.absolute())) for path in paths]  # ".." could lead out of the folder
    common = os.path.commonpath([place.parent for place in places])
    return [f"{place.relative_to(common)}.png" for place in places]


def save_drawing(image: Image.Image, target: Path) -> None:
    """Write a drawing and create its folder.

    Raises:
        InvalidInput: The drawing is too large for its format.
        OSError: The file is not writable.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        image.save(target)
    except (OSError, OverflowError, ValueError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # an error of the file system
        size, hint = f"{image.width}x{image.height}", "use the suffix .png, which supports all sizes"
        raise InvalidInput(f"{target}: {size} pixels are too many for this format", hint=hint) from error
