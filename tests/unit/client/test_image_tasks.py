"""Detection, segmentation and embedding with a fake server that computes them from pixels."""

from __future__ import annotations

import asyncio
import io
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from fake_transport import FakeTransport
from PIL import Image

from graphkiln_backend.graph.contract import Contract, Contracts
from graphkiln_backend.graph.decoding import encode_json
from graphkiln_backend.graph.dtypes import DType
from graphkiln_backend.graph.errors import ClientError, InvalidInput, ProtocolError
from graphkiln_backend.graph.image_model import IMAGE_MODEL
from graphkiln_backend.graph.preprocess import Letterbox, Preprocess
from graphkiln_backend.graph.task import Classification, Detection, Embedding, Segmentation, Task
from graphkiln_backend.images.answers import Box, SegmentedImage
from graphkiln_backend.images.decoding import prepare
from graphkiln_client import preparing
from graphkiln_client.async_client import AsyncModel
from graphkiln_client.client import Model
from graphkiln_client.connection import Connection
from graphkiln_client.preparing import Form
from graphkiln_client.transports.base import InferRequest, InferResponse

SPEC = Preprocess(letterbox=Letterbox(size=(32, 32), padding=0), layout="HWC", dtype=DType.UINT8, interpolation="box")
DETECTION = Detection(boxes="b", scores="s", classes="c", counts="n", masks="m")
TASKS: dict[str, Task] = {
    "detection": DETECTION,
    "segmentation": Segmentation(scores="g"),
    "embedding": Embedding(vectors="v", normalize=True),
}


def outputs_of(pixels: Any) -> dict[str, Any]:
    """Compute the outputs of one sample: box and class of bright pixels, their map, and mean colors."""
    light = pixels[..., 0] > 100
    rows, columns = np.nonzero(light)
    found = bool(len(rows))
    box = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1] if found else [0] * 4
    return {
        "b": np.array([box, [0] * 4], np.float32),
        "s": np.array([0.75 * found, 0], np.float32),
        "c": np.array([1, 0], np.int64),
        "n": np.array(int(found), np.int32),
        "m": np.ones((2, 28, 28), np.float32),
        "g": np.stack([~light, light]).astype(np.float32),
        "v": pixels.reshape(-1, 3).mean(axis=0).astype(np.float32),
    }


class Server(FakeTransport):
    """A model with a task."""

    def __init__(self, task: Task | None, *, contract: bool = True, encoded: bool = False, **changes: Any) -> None:
        parameters: dict[str, Any] = {}
        if contract:
            said = Contracts.of({"1": Contract(preprocess=SPEC, labels=("none", "light"), task=task)})
            parameters["contracts"] = {"string_value": said.to_json()}
        elif task:
            parameters = {"preprocess": {"string_value": SPEC.to_json()}, "task": {"string_value": encode_json(task)}}
        if encoded:
            parameters[IMAGE_MODEL] = {"string_value": "m.images"}
        self.changes = changes
        super().__init__(
            {
                "model_metadata": {
                    "versions": ["1"],
                    "inputs": [{"name": "x", "datatype": "UINT8", "shape": [-1, 32, 32, 3]}],
                    "outputs": [],
                },
                "model_config": {"max_batch_size": 4, "output": [], "parameters": parameters},
                "infer": self.infer,
            }
        )

    def infer(self, request: InferRequest, timeout_s: float) -> InferResponse:
        del timeout_s
        rows = [outputs_of(pixels) for pixels in _pixels(request)]
        outputs = {name: np.stack([row[name] for row in rows]) for name in request.outputs}
        return InferResponse(model="m", version="1", outputs={**outputs, **self.changes})


def _pixels(request: InferRequest) -> Any:
    """Return the samples of a request; decode encoded images."""
    if request.model == "m":
        return request.inputs["x"]
    assert request.inputs["IMAGE"].shape[1:] == (1,)
    return [prepare(element, SPEC).sample for element in np.asarray(request.inputs["IMAGE"])[:, 0]]


def model(task: Task | None, *, form: Form = "tensor", **options: Any) -> tuple[Model, Server]:
    server = Server(task, **options)
    connection = Connection(server, 5.0, 0)
    asked = AsyncModel(connection, "m", "", images=form)
    return Model(asked), server


def file_of(pixels: Any, kind: str = "PNG", orientation: int = 1) -> bytes:
    file, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(pixels).save(file, kind, exif=exif)
    return file.getvalue()


def image(height: int, width: int, *box: int) -> Any:
    pixels = np.zeros((height, width, 3), np.uint8)
    x1, y1, x2, y2 = box or (0, 0, 0, 0)
    pixels[y1:y2, x1:x2] = 255
    return pixels


def test_detection_is_in_pixels_of_the_image() -> None:
    detector, server = model(DETECTION)
    (found,) = detector.detect(image(32, 64, 16, 8, 32, 16))
    assert found.box == Box(16, 8, 32, 16)
    assert (found.label, found.index, found.score) == ("light", 1, 0.75)
    assert found.mask is not None
    assert found.mask.pixels()[9:15, 17:31].all()
    assert set(server.inferred()[0].outputs) == {"b", "s", "c", "n", "m"}
    assert server.inferred()[0].contract


def test_score_threshold() -> None:
    detector, _ = model(DETECTION)
    assert len(detector.detect(image(64, 32, 0, 0, 8, 8), score_threshold=0.7)) == 1
    assert detector.detect(image(64, 32, 0, 0, 8, 8), score_threshold=0.8) == ()
    assert detector.detect(image(64, 32)) == ()


@pytest.mark.parametrize("threshold", [50, -0.1, float("nan")])
def test_invalid_score_threshold(threshold: float) -> None:
    with pytest.raises(InvalidInput, match="score_threshold must be between"):
        model(DETECTION)[0].detect(image(8, 8), score_threshold=threshold)


@pytest.mark.parametrize("size", [(33, 77), (128, 31), (1, 1), (1, 8000)])
def test_class_map_has_image_size(size: Any) -> None:
    segmenter, _ = model(TASKS["segmentation"])
    found = segmenter.segment(image(*size, 0, 0, size[1], size[0]))
    assert found.classes.shape == size
    assert found.label(1) == "light"
    assert found.share(1) > 0.9


def test_embedding_is_normalized() -> None:
    embedder, _ = model(TASKS["embedding"])
    np.testing.assert_allclose(embedder.embed(image(32, 32, 0, 0, 8, 8)), [3**-0.5] * 3, rtol=1e-6)


def test_normalize_override() -> None:
    embedder, _ = model(TASKS["embedding"])
    light = image(32, 32, 0, 0, 8, 8)
    for vectors in ([embedder.embed(light, normalize=False)], embedder.embed_many([light], normalize=False)):
        lengths = [float(np.linalg.norm(vector)) for vector in vectors if isinstance(vector, np.ndarray)]
        assert len(lengths) == 1
        assert abs(lengths[0] - 1) > 0.1


def test_batches_of_mixed_sizes_with_a_damaged_image_among_them() -> None:
    detector, server = model(DETECTION)
    images = [image(32, 64, 16, 8, 32, 16), b"no image", image(64, 32, 8, 16, 16, 32), image(640, 320), b""]
    found = list(detector.detect_many(images, batch_size=16, concurrency=1, on_error="return"))
    assert [isinstance(each, InvalidInput) for each in found] == [False, True, False, False, True]
    boxes = [[each.box for each in row] for row in found if not isinstance(row, ClientError)]
    assert boxes == [[Box(16, 8, 32, 16)], [Box(8, 16, 16, 32)], []]
    assert [len(request.inputs["x"]) for request in server.inferred()] == [3]  # 4 images at most, one of them damaged


def test_async_model_gives_same_results() -> None:
    async def ask(task: Task, name: str) -> list[Any]:
        connection = Connection(Server(task, contract=True), 5.0, 0)
        asked = AsyncModel(connection, "m", "")
        one = await getattr(asked, name)(image(32, 32, 4, 4, 8, 8))
        return [one, *[each async for each in getattr(asked, f"{name}_many")([image(32, 32, 4, 4, 8, 8)] * 5)]]

    detections = asyncio.run(ask(DETECTION, "detect"))
    assert [row[0].box for row in detections] == [Box(4, 4, 8, 8)] * 6
    segmented = asyncio.run(ask(TASKS["segmentation"], "segment"))
    assert [each.share(1) for each in segmented] == [16 / 1024] * 6
    assert {each.shape for each in asyncio.run(ask(TASKS["embedding"], "embed"))} == {(3,)}


@pytest.mark.parametrize(
    ("task", "verb", "words"),
    [
        (None, "detect", "'m' cannot detect: its config.pbtxt declares no such task"),
        (Classification(), "embed", "'m' cannot embed: its config.pbtxt declares no such task"),
        (DETECTION, "segment", "'m' cannot segment: its task is detection (use detect"),
        (Embedding(vectors="v"), "detect", "its task is embedding (use embed"),
    ],
)
def test_model_with_other_task(task: Task | None, verb: str, words: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        getattr(model(task)[0], verb)(image(8, 8))
    assert words in str(caught.value)


def test_task_from_configuration() -> None:
    (found,) = model(DETECTION, contract=False)[0].detect(image(32, 32, 4, 4, 8, 8))
    assert (found.box, found.label) == (Box(4, 4, 8, 8), "")


def test_outputs_that_do_not_fit_the_task() -> None:
    with pytest.raises(ProtocolError, match="hold no detections"):
        model(DETECTION, n=np.array([9], np.int32))[0].detect(image(8, 8))
    with pytest.raises(ProtocolError, match="for 1 images"):
        model(DETECTION, n=np.array([1, 1], np.int32))[0].detect(image(8, 8))


# Portrait, one pixel, one row of 8,000, and turned by the camera: the box is to be found in the upright image.
FILES = [
    file_of(image(64, 32, 8, 16, 16, 32)),
    file_of(image(1, 1)),
    file_of(image(1, 8000, 2000, 0, 6000, 1)),
    file_of(image(32, 64, 16, 8, 32, 16), "WEBP", orientation=6),
    file_of(image(8000, 40, 0, 0, 40, 8000), "TIFF", orientation=8),
    file_of(image(32, 64, 16, 8, 32, 16), orientation=3),
]


def as_seen(answer: Any) -> Any:
    """Convert an answer for an exact comparison."""
    if isinstance(answer, SegmentedImage):
        return answer.classes.shape, answer.classes.tobytes(), answer.labels
    if isinstance(answer, np.ndarray):
        return answer.tobytes()
    return [(each.box, each.label, each.score, each.mask.pixels().tobytes()) for each in answer]


@pytest.mark.parametrize(
    ("kind", "verb"), [("detection", "detect"), ("segmentation", "segment"), ("embedding", "embed")]
)
def test_encoded_images_give_equal_results(kind: str, verb: str) -> None:
    answers = {}
    for form in get_args(Form):
        asked, server = model(TASKS[kind], form=form, encoded=True)
        answers[form] = [as_seen(each) for each in getattr(asked, f"{verb}_many")(FILES, concurrency=1)]
        assert [as_seen(getattr(asked, verb)(file)) for file in FILES] == answers[form]
        models = {request.model for request in server.inferred()}
        assert (
            models == {"tensor": {"m"}, "encoded": {"m.images"}, "auto": {"m", "m.images"}}[form]
        )  # the TIFF is large
    assert answers["encoded"] == answers["tensor"] == answers["auto"]


async def _ask(asked: AsyncModel, verb: str) -> Any:
    return await getattr(asked, verb)(FILES[0])


@pytest.mark.parametrize(
    "ask",
    [lambda asked, verb: getattr(Model(asked), verb)(FILES[0]), lambda asked, verb: asyncio.run(_ask(asked, verb))],
    ids=["blocking", "async"],
)
@pytest.mark.parametrize("form", ["tensor", "encoded"])
@pytest.mark.parametrize(
    ("kind", "verb"), [("detection", "detect"), ("segmentation", "segment"), ("embedding", "embed")]
)
def test_version_of_a_backend_that_ignores_contracts(kind: str, verb: str, form: Form, ask: Any) -> None:
    """The first answer is of version 2, which has other labels and another preprocessing than the version read."""
    _, server = model(TASKS[kind], encoded=True)
    old, good = server.responses["model_config"], server.infer
    contracts = Contracts.from_json(old["parameters"]["contracts"]["string_value"])
    newer = Contract(preprocess=replace(SPEC, color="BGR"), labels=("nothing", "bright"), task=TASKS[kind])
    both = Contracts.of({"1": contracts.find("1") or newer, "2": newer})
    parameters = {**old["parameters"], "contracts": {"string_value": both.to_json()}}
    server.responses["model_config"] = [old, {**old, "parameters": parameters}]
    server.responses["model_metadata"] = [
        {**server.responses["model_metadata"], "versions": versions} for versions in (["1"], ["1", "2"])
    ]
    server.responses["infer"] = lambda *given: replace(good(*given), version="2")
    answer = ask(AsyncModel(Connection(server, 5.0, 0), "m", "", images=form), verb)
    assert [request.contract for request in server.inferred()] == [both.versions["1"], both.versions["2"]]
    if verb == "detect":
        assert answer[0].label == "bright"
    elif verb == "segment":
        assert answer.labels == ("nothing", "bright")


@pytest.mark.parametrize("form", ["encoded", "auto"])
def test_damaged_files_among_good_ones(form: Form) -> None:
    files = [FILES[0], b"no image", FILES[3][:-40], FILES[3]]
    asked, server = model(DETECTION, form=form, encoded=True)
    found = list(asked.detect_many(files, batch_size=4, on_error="return"))
    assert [isinstance(each, InvalidInput) for each in found] == [False, True, True, False]
    assert [[each.box for each in row] for row in (found[0], found[3])] == [[Box(8, 16, 16, 32)], [Box(16, 16, 24, 32)]]
    assert ("m" in {request.model for request in server.inferred()}) == (form == "auto")


def test_model_without_encoded_images() -> None:
    with pytest.raises(InvalidInput, match="does not accept encoded"):
        model(DETECTION, form="encoded")[0].detect(FILES[0])


def test_preprocess_of_encoded_images_is_the_servers() -> None:
    connection = Connection(Server(DETECTION, encoded=True), 5.0, 0)
    asked = Model(AsyncModel(connection, "m", "", images="encoded", preprocess=SPEC))
    with pytest.raises(InvalidInput, match="preprocess="):
        asked.detect(FILES[0])


@pytest.mark.parametrize("form", get_args(Form))
def test_companion_model_is_refused(form: Form) -> None:
    asked, server = model(DETECTION, form=form)
    server.responses["model_config"]["parameters"]["tensor_model"] = {"string_value": "m0"}
    for ask in (lambda: asked.detect(FILES[0]), lambda: list(asked.detect_many(FILES)), lambda: asked.classify(b"")):
        with pytest.raises(InvalidInput, match="on behalf of 'm0'"):
            ask()


def test_unknown_option_is_refused() -> None:
    options: Any = {"threshold": 0.9}
    asked = AsyncModel(Connection(Server(DETECTION), 5.0, 0), "m", "")
    for detector in (asked, Model(asked)):
        with pytest.raises(TypeError, match="unexpected keyword argument 'threshold'"):
            detector.detect_many([image(8, 8)], **options)


@pytest.mark.parametrize("refused", [False, True], ids=["larger than its sample", "refused"])
def test_image_of_a_url_is_downloaded_once(monkeypatch: pytest.MonkeyPatch, refused: bool) -> None:
    """The image is decoded here if it is larger than its tensor, or if the server rejects it."""
    noise = np.random.default_rng(0).integers(0, 256, (90, 90, 3), np.uint8)
    content, urls = FILES[0] if refused else file_of(noise), []
    monkeypatch.setattr(preparing, "download", lambda url, _: urls.append(url) or content)
    server = Server(DETECTION, encoded=True)
    infer = server.infer

    def refuse(request: InferRequest, timeout_s: float) -> InferResponse:
        if request.model != "m":
            raise InvalidInput("no", status=400)
        return infer(request, timeout_s)

    server.responses["infer"] = refuse
    Model(AsyncModel(Connection(server, 5.0, 0), "m", "", fetch_urls=True)).detect("https://host/a.png")
    assert urls == ["https://host/a.png"]
    assert [request.model for request in server.inferred()] == (["m.images", "m"] if refused else ["m"])
