"""`graphkiln classify`, `detect` and `segment`, and what they share with `embed`: images, requests, drawings."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from graphkiln.cli.connection import DEFAULT_CONNECTION, ConnectionOptions, with_connection
from graphkiln.cli.console import print_csv, print_json, print_table, printable, progress_bar, say
from graphkiln.cli.options import AsCsv, AsJson, ModelName, ModelVersion
from graphkiln_backend.graph.errors import ClientError, InvalidInput
from graphkiln_backend.images.formats import SUFFIXES, list_images, recognize_text

if TYPE_CHECKING:
    from PIL import Image

    from graphkiln_client import Detection, Model, Result, SegmentedImage
    from graphkiln_client.preparing import Form

T = TypeVar("T")
Document = Mapping[str, Any]

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

_CLASSIFICATION_COLUMNS = ("source", "model", "version", "output", "position", "rank", "index", "label", "score")
_CORNERS = ("x1", "y1", "x2", "y2")
# Number of images from which on a progress bar is shown.
_MANY = 20
# URL prefixes as `Path` represents them, which merges slashes.
_URLS = ("http:/", "https:/")
_SHOWN_CHARACTERS = 60


@with_connection()
def classify(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    top_k: Annotated[int, typer.Option(help="Labels per image, best first.", min=1)] = 5,
    softmax: Annotated[bool, typer.Option("--softmax", help="Convert scores to probabilities.")] = False,
    batch_size: BatchSize = 16,
    concurrency: Concurrency = 8,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Classify images with a served model: labeled top-k, best first.

    Exit code 1 when an image failed; the others are classified.
    """
    check_formats([], None, as_json=as_json, as_csv=as_csv)
    paths = expand_folders(images)
    answered, failures = send_images(
        connection, (model, version, encoded), paths, (batch_size, concurrency),
        lambda served, options: served.classify_many(paths, top_k=top_k, softmax=softmax, **options),
    )  # fmt: skip
    results = [result for _, result in answered]
    if as_json:
        print_json([result.to_dict() for result in results])
    elif as_csv:
        print_csv(_CLASSIFICATION_COLUMNS, _ranked_rows(results))
    elif results:
        _print_classifications(results)
    report_failures(failures)


def _ranked_rows(results: Sequence[Result]) -> Iterator[Sequence[object]]:
    """Yield a CSV row for each label; columns are the same for all models."""
    for result in results:
        for output, ranking in result.outputs.items():
            ranks: dict[tuple[int, ...], int] = {}
            for found in ranking:
                rank = ranks[found.position] = ranks.get(found.position, 0) + 1
                position = "/".join(map(str, found.position))
                served = (result.source, result.model, result.version, output, position)
                yield (*served, rank, found.index, found.label, found.score)


def _print_classifications(results: Sequence[Result]) -> None:
    several = any(len(result.outputs) > 1 for result in results)
    placed = any(found.position for result in results for ranking in result.outputs.values() for found in ranking)
    extra = [*(["output"] if several else []), *(["position"] if placed else [])]
    rows = []
    images = Counter(result.request_id for result in results)
    for result in results:
        count, name = images.pop(result.request_id, 0), Path(result.source).name
        shared = f" for {count} images" if count > 1 else ""
        latency = f"{result.latency_ms:.1f} ms{shared}" if count else ""  # once for each request
        for output, ranking in result.outputs.items():
            for found in ranking:
                where = [*([output] if several else []), *([str(found.position)] if placed else [])]
                rows.append([name, *where, found.label or "-", str(found.index), f"{found.score:.4f}", latency])
                name = latency = ""  # once for each image
    print_table(["image", *extra, "label", "index", "score", "latency"], rows)


@with_connection()
def detect(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    threshold: Annotated[
        float | None,
        typer.Option(help="Minimum score of a detection.", show_default="the model's", min=0, max=1, metavar="SCORE"),
    ] = None,
    draw: Annotated[
        Path | None, typer.Option(help="Draw the boxes into a copy of the image; a folder for several.", metavar="OUT")
    ] = None,
    batch_size: BatchSize = 8,
    concurrency: Concurrency = 4,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Detect objects in images: boxes in pixels, labels, scores.

    Exit code 1 when an image failed; the results of the others are shown.
    """
    paths = expand_folders(images)
    check_formats(paths, draw, as_json=as_json, as_csv=as_csv)
    targets = drawing_paths(paths, draw)
    found, failures = send_images(
        connection, (model, version, encoded), paths, (batch_size, concurrency),
        lambda served, options: served.detect_many(paths, score_threshold=threshold, **options),
    )  # fmt: skip
    if as_json:
        rows = [{"source": str(path), "detections": [each.to_dict() for each in things]} for path, things in found]
        print_json(rows)
    elif as_csv:
        ranked = [(path, rank, each) for path, things in found for rank, each in enumerate(things, 1)]
        print_csv(
            ("source", "rank", "index", "label", "score", *_CORNERS),
            [(path, rank, each.index, each.label, each.score, *astuple(each.box)) for path, rank, each in ranked],
        )
    elif found:
        print_table(("image", "label", "score", *_CORNERS), _detection_rows(found))
    if draw:
        from graphkiln.cli.drawing import draw_detections
        from graphkiln_backend.images.decoding import open_image

        for path, things in found:
            save_drawing(draw_detections(open_image(path), things), targets[path])
    report_failures(failures)


def _detection_rows(found: Sequence[tuple[Path, tuple[Detection, ...]]]) -> Iterator[list[str]]:
    for path, things in found:
        name = path.name
        for each in things:
            corners = [f"{edge:.1f}" for edge in astuple(each.box)]
            yield [name, each.label or str(each.index), f"{each.score:.4f}", *corners]
            name = ""  # once for each image
        if not things:
            yield [name, "nothing found"]


@with_connection()
def segment(
    images: Images,
    model: ModelName,
    version: ModelVersion = "",
    connection: ConnectionOptions = DEFAULT_CONNECTION,
    draw: Annotated[
        Path | None,
        typer.Option(help="Tint a copy of the image by its classes; a folder for several.", metavar="OUT"),
    ] = None,
    batch_size: BatchSize = 8,
    concurrency: Concurrency = 4,
    encoded: Encoded = None,
    as_json: AsJson = False,
    as_csv: AsCsv = False,
) -> None:
    """Segment images: the class of every pixel.

    --json contains masks as run lengths. Exit code 1 when an image failed; the results of the others are shown.
    """
    paths = expand_folders(images)
    check_formats(paths, draw, as_json=as_json, as_csv=as_csv)
    targets = drawing_paths(paths, draw)

    def describe(served: Model, options: dict[str, Any]) -> Iterator[Document | ClientError]:
        # one by one: the class maps of a folder may exceed the memory
        for path, answer in zip(paths, served.segment_many(paths, **options), strict=True):
            if isinstance(answer, ClientError):
                yield answer
            else:
                yield _describe_segments(path, answer, targets.get(path), whole=as_json)

    found, failures = send_images(connection, (model, version, encoded), paths, (batch_size, concurrency), describe)
    segments = [(path, each) for path, document in found for each in document["segments"]]
    if as_json:
        print_json([{"source": str(path), **document} for path, document in found])
    elif as_csv:
        rows = [(path, each["index"], each["label"], each["share"]) for path, each in segments]
        print_csv(("source", "index", "label", "share"), rows)
    elif found:
        _print_segments(segments)
    report_failures(failures)


def _describe_segments(path: Path, answer: SegmentedImage, target: Path | None, *, whole: bool) -> Document:
    """Describe the classes of an image, with masks if `whole`; write the drawing if there is a target."""
    if target:
        from graphkiln.cli.drawing import draw_segments
        from graphkiln_backend.images.decoding import open_image

        save_drawing(draw_segments(open_image(path), answer), target)
    if whole:
        return answer.to_dict()
    shares = [{"label": answer.label(index), "index": index, "share": answer.share(index)} for index in answer.present]
    return {"segments": shares}


def _print_segments(segments: list[tuple[Path, Document]]) -> None:
    rows, last = [], None
    for path, each in segments:
        share = f"{100 * each['share']:.1f} %"
        rows.append(["" if path is last else path.name, each["label"] or "-", str(each["index"]), share])
        last = path
    print_table(("image", "label", "index", "share"), rows)


# Arguments, requests and errors.


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
        shown = str(image)[:_SHOWN_CHARACTERS]
        raise InvalidInput(
            f"{shown}... is not a path but {found.name}", hint=f"{found.hint}; then give the path of the file"
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
