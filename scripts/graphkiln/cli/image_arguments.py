"""Shared parts of the verbs that take images: folders, progress, failures of single images, drawings."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from graphkiln.cli.console import printable, say, stderr_console
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.images.formats import SUFFIXES, list_images, recognize_text

if TYPE_CHECKING:
    from PIL import Image

    from graphkiln.cli.connection import ConnectionOptions
    from graphkiln_client import Model
    from graphkiln_client.image_requests import Form

T = TypeVar("T")

Images = Annotated[list[Path], typer.Argument(help="Image files or folders of them.", metavar="IMAGE")]
BatchSize = Annotated[int, typer.Option(help="Most images in one request.", min=1)]
Concurrency = Annotated[int, typer.Option(help="Concurrent requests.", min=1)]
Encoded = Annotated[
    bool | None,
    typer.Option(
        "--encoded/--tensor",
        help="Send images as they are, or decode them here.",
        show_default="as they are, where that is smaller and the server takes them",
    ),
]
# `Encoded` -> how images travel, as the client names it.
FORMS: dict[bool | None, Form] = {None: "auto", True: "encoded", False: "tensor"}

# Images above which a progress bar is shown.
_MANY = 20
# As a path has them, which holds no two slashes in a row.
_URLS = ("http:/", "https:/")
_SHOWN = 60


def ask(
    connection: ConnectionOptions,
    served: tuple[str, str, bool | None],
    paths: Sequence[Path],
    batching: tuple[int, int],
    request: Callable[[Model, dict[str, Any]], Iterable[T | ClientError]],
) -> tuple[list[tuple[Path, T]], list[tuple[Path, ClientError]]]:
    """Ask a model about images, with a progress bar, and split answers from errors, each with its image.

    Args:
        connection: To the server.
        served: Name of the model, its version or "", and the value of `Encoded`.
        paths: The images.
        batching: Values of `BatchSize` and `Concurrency`.
        request: Takes the model and those options of its methods for many images that all verbs set alike.

    Raises:
        ClientError: All failed for the same reason, which is reported once.
    """
    name, version, encoded = served
    batch_size, concurrency = batching
    with connection.connect() as client, show_progress(len(paths)) as progress:
        options = {"batch_size": batch_size, "concurrency": concurrency, "on_error": "return", "progress": progress}
        answers = list(request(client.model(name, version, images=FORMS[encoded]), options))
    return split_errors(paths, answers)


@contextmanager
def show_progress(count: int) -> Iterator[Callable[[int], None] | None]:
    """A progress bar on a terminal's stderr, for many images."""
    if count < _MANY or not (console := stderr_console()):
        yield None
        return
    from rich.progress import Progress

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("images", total=count)
        yield lambda done: bar.update(task, completed=done)


def expand_folders(images: Sequence[Path]) -> list[Path]:
    """Replace folders by the images in them, sorted; warn about images of other formats there.

    Raises:
        InvalidInput: A folder holds none, or an argument is no local file.
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
    """Refuse an argument that is no path: a URL, an image as text, and `-` for a pipe.

    Raises:
        InvalidInput: The argument is one of these.
    """
    if os.path.exists(image):  # noqa: PTH110 - of a name that is too long, `Path.exists` fails
        return
    if found := recognize_text(os.fsencode(image)):
        shown = str(image)[:_SHOWN]
        raise InvalidInput(f"{shown}... is no path: it is {found.name}", hint=f"{found.way_out}; name the file of it")
    if str(image).startswith(_URLS):
        raise InvalidInput(
            f"{image} is a URL, and images are read from files here",
            hint="download it first (curl -O URL), or let Python fetch it: Client(fetch_urls=True)",
        )
    if str(image) == "-":
        hint = "write it to a file first, and name that: ... > image.jpg"
        raise InvalidInput("-: images are read from files, not from what is piped in", hint=hint)


def split_errors(
    paths: Sequence[Path], answers: Sequence[T | ClientError]
) -> tuple[list[tuple[Path, T]], list[tuple[Path, ClientError]]]:
    """Split answers from errors, each with its image.

    Raises:
        ClientError: All failed for the same reason, which is reported once.
    """
    pairs = list(zip(paths, answers, strict=True))
    failures = [(path, answer) for path, answer in pairs if isinstance(answer, ClientError)]
    if len({str(error) for _, error in failures}) == 1 and len(failures) == len(paths):
        raise failures[0][1]
    return [(path, answer) for path, answer in pairs if not isinstance(answer, ClientError)], failures


def report_failures(failures: Sequence[tuple[Path, ClientError]]) -> None:
    """Report failed images on stderr; exit with code 1 if there are any."""
    for path, error in failures:
        text = str(error)
        say(printable(text if text.startswith(str(path)) else f"{path}: {text}"))
    if failures:
        raise typer.Exit(1)


def check_formats(paths: Sequence[Path], draw: Path | None, *, as_json: bool, as_csv: bool) -> None:
    """Refuse options that exclude one another.

    Raises:
        InvalidInput: Some of the options do.
    """
    if as_json and as_csv:
        raise InvalidInput("--json and --csv: choose one")
    if draw is None or not _is_file_name(draw):
        return
    if len(paths) > 1:
        raise InvalidInput(f"--draw {draw} is one file for {len(paths)} images", hint="give a folder: --draw OUT/")
    if draw.suffix.lower() not in SUFFIXES:
        raise InvalidInput(
            f"--draw {draw}: not a format of images", hint=f"known endings: {' '.join(sorted(SUFFIXES))}"
        )


def drawing_paths(paths: Sequence[Path], draw: Path | None) -> dict[Path, Path]:
    """Destination of each image's drawing: the file `draw`, or in that folder a file with the image's name.

    Images with the same name keep their folders below the common one.

    Returns:
        Image -> its drawing; empty where `draw` is None.

    Raises:
        InvalidInput: A drawing would take the place of an image.
    """
    if draw is None:
        return {}
    targets = [draw] if len(paths) == 1 and _is_file_name(draw) else [draw / name for name in _names(paths)]
    images = {path.resolve(): path for path in paths}
    for target in targets:
        if image := images.get(target.resolve()):
            raise InvalidInput(f"--draw {draw}: a drawing would take the place of {image}", hint="draw into a folder")
    return dict(zip(paths, targets, strict=True))


def _is_file_name(draw: Path) -> bool:
    return bool(draw.suffix) and not draw.is_dir()


def _names(paths: Sequence[Path]) -> list[str]:
    stems = [path.stem for path in paths]
    if len({*stems}) == len({*paths}):
        return [f"{stem}.png" for stem in stems]
    places = [Path(os.path.normpath(path.absolute())) for path in paths]  # ".." would lead out of the folder
    common = os.path.commonpath([place.parent for place in places])
    return [f"{place.relative_to(common)}.png" for place in places]


def save_drawing(image: Image.Image, target: Path) -> None:
    """Write a drawing, and create its folder.

    Raises:
        InvalidInput: The drawing is larger than its format can hold.
        OSError: The file cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        image.save(target)
    except (OSError, OverflowError, ValueError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # of the disk
        size, hint = f"{image.width}x{image.height}", "name it .png, which holds images of any size"
        raise InvalidInput(f"{target}: its format cannot hold {size} pixels", hint=hint) from error
